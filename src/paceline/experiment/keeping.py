"""The state of tools, and of whatever an experiment registers, as values that a checkpoint holds."""

from __future__ import annotations

import copy
from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Any

import torch

from paceline.checkpoints.content.tree import Encoder
from paceline.errors import ArgumentError, CheckpointValueError


def is_holdable(value: Any) -> bool:
    """Whether a checkpoint can hold it: by the word of who writes checkpoints. Nothing is copied."""
    try:
        Encoder().encode(value)
    except CheckpointValueError:
        return False
    return True


def attributes(tool: Any) -> dict[str, Any]:
    """What a tool without `state_dict` remembers: its attributes, as far as a checkpoint can hold them."""
    held = {name: _plain(value) for name, value in _vars(tool).items() if not has_state(tool)}
    return {name: value for name, value in held.items() if is_holdable(value)}


def others(tool: Any) -> dict[str, Any]:
    """Attributes that a checkpoint cannot hold. Only whether they are still the same objects can be told of them."""
    held = _vars(tool) if not has_state(tool) else {}
    return {name: one for name, one in held.items() if not is_holdable(_plain(one)) and not _is_inner(one)}


def has_state(tool: Any) -> bool:
    """Whether it says itself what is to be kept."""
    return all(callable(getattr(tool, name, None)) for name in ("state_dict", "load_state_dict"))


def changes(tool: Any, first: Mapping[str, Any]) -> dict[str, Any]:
    """What a tool has come to remember since it was made. What it was configured with is not among it: who goes on with
    another patience means it."""
    if has_state(tool):
        return {"state_dict": tool.state_dict()}
    inner = {name: one.state_dict() for name, one in _vars(tool).items() if _is_inner(one)}
    return {**changed_attributes(tool, first), **({"inner": inner} if inner else {})}


def changed_attributes(tool: Any, first: Mapping[str, Any]) -> dict[str, Any]:
    now = attributes(tool)
    return {"attributes": {name: value for name, value in now.items() if not _is_same(value, first.get(name, ...))}}


def put_back(tool: Any, state: Mapping[str, Any]) -> None:
    if "state_dict" in state:
        tool.load_state_dict(state["state_dict"])
    for name, value in state.get("attributes", {}).items():
        setattr(tool, name, _as_before(copy.deepcopy(value), getattr(tool, name, None)))
    for name, value in state.get("inner", {}).items():
        if _is_inner(getattr(tool, name, None)):
            getattr(tool, name).load_state_dict(value)


def read_path(owner: Any, path: str) -> Any:
    """The state of what an attribute path leads to."""
    value = _reach(owner, path)
    is_stateful = callable(getattr(value, "state_dict", None))
    return {"state_dict": value.state_dict()} if is_stateful else {"value": _plain(value)}


def write_path(owner: Any, path: str, state: Mapping[str, Any]) -> None:
    *way, name = path.split(".")
    holder = _reach(owner, ".".join(way)) if way else owner
    if "state_dict" in state:
        getattr(holder, name).load_state_dict(state["state_dict"])
    else:
        setattr(holder, name, _as_before(state["value"], getattr(holder, name, None)))


def _vars(tool: Any) -> dict[str, Any]:
    return vars(tool) if hasattr(tool, "__dict__") else {}


def _is_inner(value: Any) -> bool:
    """A part of a tool that has a state of its own: a scheduler of torch, say. Models and optimizers are the
    experiment's, and saved as such."""
    return has_state(value) and not isinstance(value, torch.nn.Module | torch.optim.Optimizer | type)


def _plain(value: Any) -> Any:
    """A checkpoint knows no deque."""
    return list(value) if type(value) is deque else value


def _as_before(value: Any, there: Any) -> Any:
    """As the kind of container that the tool has there: from a checkpoint, a deque comes as a list, and a dict with a
    default without it."""
    if type(there) is deque and isinstance(value, list):
        return deque(value, there.maxlen)
    if type(there) is defaultdict and type(value) is dict:
        return defaultdict(there.default_factory, value)
    return value


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
