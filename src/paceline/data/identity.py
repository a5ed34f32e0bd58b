"""What makes one function another: its code and what it has closed over, the same in every process."""

import pickle
from functools import partial
from hashlib import blake2b
from types import CodeType
from typing import Any

import numpy as np

_PLAIN = (int, float, str, bytes, bool, type(None))


def identity_of(value: Any) -> str:
    """Of a function, an Arrow expression, or what a function has closed over. It does not know what a global name
    stands for."""
    return blake2b(repr(_parts(value, ())).encode(), digest_size=8).hexdigest()


def _parts(value: Any, above: tuple[int, ...]) -> Any:
    """`above` are the ids of the values that hold this one: a function may call itself."""
    if isinstance(value, _PLAIN):
        return value
    if id(value) in above:
        return "itself", above.index(id(value))
    above = (*above, id(value))
    if isinstance(value, tuple | list):
        return [type(value).__name__, *(_parts(one, above) for one in value)]
    if isinstance(value, set | frozenset):
        return [type(value).__name__, *sorted(repr(_parts(one, above)) for one in value)]
    if isinstance(value, dict):
        return ["dict", *((_parts(key, above), _parts(one, above)) for key, one in value.items())]
    if isinstance(value, np.ndarray):
        return "array", str(value.dtype), value.shape, blake2b(np.ascontiguousarray(value).tobytes()).hexdigest()
    if isinstance(value, CodeType):  # without its place in the file, which changes with every line above it
        return value.co_code.hex(), value.co_names, [_parts(constant, above) for constant in value.co_consts]
    if isinstance(value, partial):
        return ["partial", *(_parts(one, above) for one in (value.func, value.args, value.keywords))]
    if type(value).__module__.startswith("pyarrow"):
        return blake2b(pickle.dumps(value)).hexdigest()
    if hasattr(value, "__code__"):
        cells = [_contents(cell, above) for cell in value.__closure__ or ()]
        defaults = [_parts(one, above) for one in (value.__defaults__, value.__kwdefaults__)]
        return _parts(value.__code__, above), cells, defaults
    kind = value if isinstance(value, type) else type(value)
    name = f"{kind.__module__}.{getattr(value, '__qualname__', kind.__qualname__)}"
    return name, [] if isinstance(value, type) else _parts(getattr(value, "__dict__", None), above)


def _contents(cell: Any, above: tuple[int, ...]) -> Any:
    try:
        return _parts(cell.cell_contents, above)
    except ValueError:  # it is empty, as that of a function that calls itself while it is made
        return "empty"
