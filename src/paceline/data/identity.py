"""What makes one function another: its code and what it has closed over, the same in every process."""

from functools import partial
from hashlib import blake2b
from types import CodeType
from typing import Any

_PLAIN = (int, float, str, bytes, bool, type(None))


def identity_of(value: Any) -> str:
    """Of a function, an Arrow expression, or what a function has closed over. It does not know what a global name
    stands for, nor what is in an object."""
    return blake2b(repr(_parts(value)).encode(), digest_size=8).hexdigest()


def _parts(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, tuple | list | frozenset):
        return [type(value).__name__, *map(_parts, sorted(value, key=repr) if isinstance(value, frozenset) else value)]
    if isinstance(value, CodeType):  # without its place in the file, which changes with every line above it
        return value.co_code.hex(), value.co_names, [_parts(constant) for constant in value.co_consts]
    if isinstance(value, partial):
        return "partial", _parts(value.func), _parts(value.args), sorted(value.keywords)
    if type(value).__module__.startswith("pyarrow"):
        return str(value)
    code = getattr(value, "__code__", None)
    if code is None:
        kind = value if isinstance(value, type) else type(value)
        return f"{kind.__module__}.{getattr(value, '__qualname__', kind.__qualname__)}"
    cells = [_contents(cell) for cell in value.__closure__ or ()]
    return _parts(code), cells, _parts(value.__defaults__)


def _contents(cell: Any) -> Any:
    try:
        return _parts(cell.cell_contents)
    except ValueError:  # it is empty, as that of a function that calls itself while it is made
        return "empty"
    except RecursionError:
        return "itself"
