"""Pickling for the trip between driver and worker.

Functions and classes of `__main__` and notebooks travel by value (cloudpickle). Some values of a framework travel as
others, such as a DDP model as the model it wraps: the receiver may have neither the process group nor the GPU.
"""

import importlib
import io
import linecache
import os
import pickle
import sys
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

import cloudpickle

from paceline import frameworks


@dataclass
class Brought:
    """What a parcel has brought along. Put an empty one last into what you pack: it arrives filled."""

    by_value: dict[str, Any] = field(default_factory=dict)
    """The functions and classes of the sender's `__main__` that are in the parcel, by name."""
    sources: dict[str, list[str]] = field(default_factory=dict)
    """The lines of those functions whose code is in no file, such as a notebook's cells, by the name of that code."""


class _Packer(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO):
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._brought = Brought()

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, ModuleType) and (way := _way_to_module(obj)) is not None:
            return way
        if isinstance(obj, Brought):
            return Brought, (self._brought.by_value, self._brought.sources)
        if isinstance(obj, FunctionType | type):
            self._note(obj)
        framework = frameworks.of(obj)
        if framework is not None and (stand_in := framework.pack_as(obj)) is not obj:
            return _same, (stand_in,)
        return super().reducer_override(obj)

    def _note(self, obj: Any) -> None:
        name = obj.__qualname__
        if obj.__module__ == "__main__" and name.isidentifier():
            # Another of the same name, of an earlier cell say, may be in use: what the name means now is preferred.
            if getattr(sys.modules["__main__"], name, None) is obj:
                self._brought.by_value[name] = obj
            self._brought.by_value.setdefault(name, obj)
        if isinstance(obj, FunctionType):
            code_name = obj.__code__.co_filename
            if code_name in linecache.cache and not os.path.exists(code_name):
                self._brought.sources[code_name] = linecache.getlines(code_name)


def _way_to_module(module: ModuleType) -> tuple[Any, tuple[Any, ...]] | None:
    """How the receiver gets this module, if it is one that cloudpickle does not know: of a class of its own, as
    `torch.ops` is, under another name than its own, or only an attribute of another module."""
    name = module.__name__
    if sys.modules.get(name) is module:
        return None if type(module) is ModuleType else (importlib.import_module, (name,))
    for key, other in list(sys.modules.items()):
        if other is module:
            return importlib.import_module, (key,)
    parent, _, attribute = name.rpartition(".")
    if parent in sys.modules and getattr(sys.modules[parent], attribute, None) is module:
        return getattr, (sys.modules[parent], attribute)
    return None


def _same(obj: Any) -> Any:
    return obj


def dumps(obj: Any) -> bytes:
    buffer = io.BytesIO()
    _Packer(buffer).dump(obj)
    return buffer.getvalue()


def quick_dumps(obj: Any) -> bytes:
    """Of what is nearly always plain, and is sent so often that it counts: by pickle, and as above if that cannot."""
    try:
        return pickle.dumps(obj, pickle.HIGHEST_PROTOCOL)
    except Exception:
        return dumps(obj)


loads = pickle.loads
