"""The `__main__` of a worker. It has the functions and classes of the driver's `__main__` that have come to the worker,
so that they can be pickled there by name, as in the script: by `torch.save(model)`, by `multiprocessing`.

A process that is spawned from a worker gets them as well. It does not import the script again, as it would be done in a
script: that needs a main guard, and notebooks have no file.
"""

import contextlib
import linecache
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from paceline.workers import parcel

_handed_over: bytes | None = None
"""In a spawned process, until its `__main__` is made."""


def become_main(file: str | None) -> None:
    """In a worker: have a `__main__` of our own, since that of Ray's workers has a life of its own."""
    main = sys.modules["__main__"]
    if not isinstance(main, _Main):
        main = sys.modules["__main__"] = _Main("__main__")
        main.__spec__ = spec()
    if file is not None:
        main.__file__ = file


def publish(brought: parcel.Brought) -> None:
    vars(sys.modules["__main__"]).update(brought.by_value)
    for name, lines in brought.sources.items():  # without a time, it stays when files are looked at again
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)


class _Main(ModuleType):
    pass


def spec() -> ModuleSpec:
    """By which `multiprocessing` finds the `__main__` of a process that it spawns."""
    return ModuleSpec(_Name(f"{__package__}.spawned_main"), None)


class _Name(str):
    """The name of the module that a spawned process runs as its `__main__`. When `multiprocessing` sends it there,
    everything that this process has goes with it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _take, (str(self), _packed(vars(sys.modules["__main__"])))


def _packed(names: dict[str, Any]) -> bytes:
    ours = {name: value for name, value in names.items() if getattr(value, "__module__", None) == "__main__"}
    with contextlib.suppress(Exception):
        return parcel.dumps(ours)
    kept = {}
    for name, value in ours.items():  # a function may have got something that does not travel; the others do
        with contextlib.suppress(Exception):
            parcel.dumps(value)
            kept[name] = value
    return parcel.dumps(kept)


def _take(name: str, packed: bytes) -> str:
    """In a spawned process, which does not know its `sys.path` yet."""
    global _handed_over
    _handed_over = packed
    return name


def unpacked() -> dict[str, Any]:
    """In a spawned process: what its `__main__` has."""
    names: dict[str, Any] = parcel.loads(_handed_over) if _handed_over is not None else {}
    return {**names, "__spec__": spec()}
