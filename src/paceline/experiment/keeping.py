"""The state of tools, and of whatever an experiment registers, as values that a checkpoint holds."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from paceline.errors import ArgumentError

_SCALARS = (bool, int, float, str, bytes, type(None))


def is_holdable(value: Any) -> bool:
    """Whether a checkpoint can hold it."""
    if isinstance(value, _SCALARS) or type(value) is torch.Tensor or type(value).__module__ == "numpy":
        return True
    if isinstance(value, dict):
        return all(is_holdable(key) and is_holdable(item) for key, item in value.items())
    return isinstance(value, list | tuple | set) and all(map(is_holdable, value))


def attributes(tool: Any) -> dict[str, Any]:
    """What a tool without `state_dict` remembers: its attributes, as far as a checkpoint can hold them."""
    held = vars(tool) if hasattr(tool, "__dict__") else {}
    return {name: value for name, value in held.items() if is_holdable(value)}


def changes(tool: Any, first: Mapping[str, Any]) -> dict[str, Any]:
    """What a tool has come to remember since it was made. What it was configured with is not among it: who goes on with
    another patience means it."""
    if callable(getattr(tool, "state_dict", None)):
        return {"state_dict": tool.state_dict()}
    now = attributes(tool)
    return {"attributes": {name: value for name, value in now.items() if not _is_same(value, first.get(name, ...))}}


def put_back(tool: Any, state: Mapping[str, Any]) -> None:
    if "state_dict" in state:
        tool.load_state_dict(state["state_dict"])
    for name, value in state.get("attributes", {}).items():
        setattr(tool, name, copy.deepcopy(value))


def read_path(owner: Any, path: str) -> Any:
    """The state of what an attribute path leads to."""
    value = _reach(owner, path)
    return {"state_dict": value.state_dict()} if callable(getattr(value, "state_dict", None)) else {"value": value}


def write_path(owner: Any, path: str, state: Mapping[str, Any]) -> None:
    *way, name = path.split(".")
    holder = _reach(owner, ".".join(way)) if way else owner
    if "state_dict" in state:
        getattr(holder, name).load_state_dict(state["state_dict"])
    else:
        setattr(holder, name, state["value"])


def _reach(owner: Any, path: str) -> Any:
    for name in path.split("."):
        if not hasattr(owner, name):
            raise ArgumentError(f"register_stateful({path!r}): {type(owner).__name__} has no attribute {name!r}.")
        owner = getattr(owner, name)
    return owner


def _is_same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one is other or torch.equal(one, other)
    try:
        return bool(one == other)
    except (ValueError, RuntimeError, TypeError):  # containers of arrays
        return False
