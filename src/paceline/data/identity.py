"""What makes one function another: its code and what it has closed over, the same in every process."""

from __future__ import annotations

import copyreg
import pickle
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from types import CodeType, ModuleType
from typing import Any

import numpy as np

_PLAIN = (int, float, complex, str, bytes, bool, type(None), type(Ellipsis))


def identity_of(value: Any) -> str:
    """Of a function, an Arrow expression, or what a function has closed over. It does not know what a global name
    stands for."""
    return _Walk().digest(value, ())


class _Walk:
    """Each value is looked at once, however many others hold it: what an object holds may be half of a program."""

    def __init__(self) -> None:
        self._known: dict[int, str] = {}
        self._alive: list[Any] = []
        """What was seen: an id is only good for as long as its value is there."""

    def digest(self, value: Any, above: tuple[int, ...]) -> str:
        """`above` are the ids of the values that hold this one: a function may call itself."""
        if id(value) in above:
            return f"itself {above.index(id(value))}"
        if id(value) not in self._known:
            parts = repr(self._parts(value, (*above, id(value))))
            self._known[id(value)] = blake2b(parts.encode(errors="surrogatepass"), digest_size=8).hexdigest()
            self._alive.append(value)
        return self._known[id(value)]

    def _each(self, values: Any, above: tuple[int, ...]) -> list[str]:
        return [self.digest(value, above) for value in values]

    def _parts(self, value: Any, above: tuple[int, ...]) -> Any:
        if type(value) in _PLAIN:
            return value
        if isinstance(value, tuple | list):
            return type(value).__name__, self._each(value, above)
        if isinstance(value, set | frozenset):
            return type(value).__name__, sorted(self._each(value, above))
        if isinstance(value, dict):
            return type(value).__name__, self._each(value, above), self._each(value.values(), above)
        if isinstance(value, type | ModuleType):
            return _name(value)
        if isinstance(value, CodeType):  # without its place in the file, which changes with every line above it
            return value.co_code.hex(), value.co_names, self._each(value.co_consts, above)
        if isinstance(value, partial):
            return "partial", self._each((value.func, value.args, value.keywords), above)
        if type(value).__module__.startswith("pyarrow"):
            return blake2b(pickle.dumps(value)).hexdigest()
        if (array := _array_of(value)) is not None:
            return "array", str(array.dtype), array.shape, _content(array)
        if getattr(value, "__self__", None) is not None and not isinstance(value.__self__, ModuleType):
            return "method", value.__name__, self._each((value.__self__, getattr(value, "__func__", None)), above)
        if hasattr(value, "__code__"):
            cells = [self._contents(cell, above) for cell in value.__closure__ or ()]
            return "function", self._each((value.__code__, value.__defaults__, value.__kwdefaults__), above), cells
        return _name(value), self._state(value, above)

    def _contents(self, cell: Any, above: tuple[int, ...]) -> str:
        try:
            return self.digest(cell.cell_contents, above)
        except ValueError:  # it is empty, as that of a function that calls itself while it is made
            return "empty"

    def _state(self, value: Any, above: tuple[int, ...]) -> Any:
        """What an object holds, as it would be pickled: many have no `__dict__`, and others hold more than they are."""
        try:
            known = copyreg.dispatch_table.get(type(value))
            reduced: Any = value.__reduce_ex__(4) if known is None else known(value)
            if isinstance(reduced, str):
                return reduced
            return self._each([list(one) if hasattr(one, "__next__") else one for one in reduced[1:]], above)
        except RecursionError:
            raise
        except Exception:  # it cannot be pickled
            return self.digest(getattr(value, "__dict__", None), above)


def _name(value: Any) -> str:
    if isinstance(value, ModuleType):
        return f"module {value.__name__}"
    kind = value if isinstance(value, type) else type(value)
    return f"{kind.__module__}.{getattr(value, '__qualname__', kind.__qualname__)}"


def _array_of(value: Any) -> Any:
    """A tensor, a series or a number of numpy's is an array; None for what is none."""
    if hasattr(value, "__array__"):
        with suppress(Exception):
            return np.asarray(value)
    return None


def _content(array: Any) -> str:
    content = repr(array.tolist()).encode() if array.dtype == object else np.ascontiguousarray(array).tobytes()
    return blake2b(content).hexdigest()
