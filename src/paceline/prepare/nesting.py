"""Apply a function to every tensor in a nested value, and keep the value's own types."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch


def map_tensors(fn: Callable[[Any], Any], value: Any, *, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """Walk dicts, lists, tuples, named tuples and dataclasses; anything else is left alone.

    `is_leaf` names further objects that `fn` takes whole. A container in which nothing changed is returned
    itself, so the caller may compare by identity; one in which something changed is a copy, so the given
    value stays as it was.
    """
    if isinstance(value, torch.Tensor) or (is_leaf is not None and is_leaf(value)):
        return fn(value)
    parts = _parts(value)
    if parts is None:
        return value
    mapped = {key: map_tensors(fn, part, is_leaf=is_leaf) for key, part in parts.items()}
    if all(mapped[key] is part for key, part in parts.items()):
        return value
    return _rebuilt(value, mapped)


def is_container(value: Any) -> bool:
    """Whether `map_tensors` looks into it."""
    return _parts(value) is not None


def _parts(value: Any) -> dict[Any, Any] | None:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
    return None


def _rebuilt(value: Any, mapped: dict[Any, Any]) -> Any:
    if isinstance(value, tuple):
        items = mapped.values()
        # A named tuple wants its fields one by one in its constructor; torch's own return types want one
        # sequence.
        return type(value)._make(items) if hasattr(value, "_make") else type(value)(items)
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        return mapped
    made = copy.copy(value)
    if isinstance(made, MutableMapping | list):
        for key, part in mapped.items():
            made[key] = part
    else:
        for name, part in mapped.items():
            object.__setattr__(made, name, part)  # a frozen dataclass is copied like any other
    return made
