"""The state of tools, and of whatever an experiment registers, as values that a checkpoint holds."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

import torch

from paceline.errors import ArgumentError
from paceline.prepare import unwrap_model

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
    return {name: value for name, value in _held(tool).items() if is_holdable(value)}


def _stateful(tool: Any, others: Collection[Any]) -> dict[str, Any]:
    """Its attributes that know themselves what there is to keep: a model of its own, a scheduler. What is in the
    experiment too, `others`, is kept there; what a metric has counted is kept with the other metrics."""
    known = {id(_bare(one)) for one in others}
    found = {name: _bare(one) for name, one in _held(tool).items() if not isinstance(one, type)}
    return {name: one for name, one in found.items() if id(one) not in known and _has_state(one)}


def _bare(value: Any) -> Any:
    return unwrap_model(value) if isinstance(value, torch.nn.Module) else value


def _has_state(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _held(tool: Any) -> dict[str, Any]:
    return vars(tool) if hasattr(tool, "__dict__") else {}


def changes(tool: Any, first: Mapping[str, Any], others: Collection[Any] = ()) -> dict[str, Any]:
    """What a tool has come to remember since it was made. What it was configured with is not among it: who goes on with
    another patience means it."""
    if callable(getattr(tool, "state_dict", None)):
        return {"state_dict": tool.state_dict()}
    now = attributes(tool)
    return {
        "attributes": {name: value for name, value in now.items() if not _is_same(value, first.get(name, ...))},
        "states": {name: value.state_dict() for name, value in _stateful(tool, others).items()},
    }


def put_back(tool: Any, state: Mapping[str, Any], others: Collection[Any] = ()) -> None:
    if "state_dict" in state:
        tool.load_state_dict(state["state_dict"])
    for name, value in state.get("attributes", {}).items():
        setattr(tool, name, copy.deepcopy(value))
    inner = _stateful(tool, others)
    for name, value in state.get("states", {}).items():
        if name in inner:
            inner[name].load_state_dict(value)


def read_path(owner: Any, path: str) -> Any:
    """The state of what an attribute path leads to."""
    value = reach(owner, path)
    return {"state_dict": value.state_dict()} if callable(getattr(value, "state_dict", None)) else {"value": value}


def write_path(owner: Any, path: str, state: Mapping[str, Any]) -> None:
    *way, name = path.split(".")
    holder = reach(owner, ".".join(way)) if way else owner
    if "state_dict" in state:
        getattr(holder, name).load_state_dict(state["state_dict"])
    else:
        setattr(holder, name, state["value"])


def reach(owner: Any, path: str) -> Any:
    """What an attribute path leads to."""
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
