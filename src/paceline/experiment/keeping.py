"""The state of tools, and of whatever an experiment registers, as values that a checkpoint holds."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import pickle
from collections.abc import Mapping, Set
from typing import Any

import torch

from paceline.errors import ArgumentError, CheckpointError
from paceline.experiment.measures import is_measure, restore_states, states_of

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


def changes(tool: Any, first: Mapping[str, Any], elsewhere: Set[int] = frozenset()) -> dict[str, Any]:
    """What a tool has come to remember since it was made. What it was configured with is not among it: who goes on with
    another patience means it. Objects inside it that have a state, such as a scheduler, are kept by that; those in
    `elsewhere` (ids) are kept by themselves."""
    if _has_state(tool):
        return state_of(tool)
    now = attributes(tool)
    inside = {name: state_of(value) for name, value in _held(tool).items() if _is_part(value, elsewhere)}
    return {
        "attributes": {name: value for name, value in now.items() if not _is_same(value, first.get(name, ...))},
        "inside": {name: state for name, state in inside.items() if is_holdable(state)},
    }


def put_back(tool: Any, state: Mapping[str, Any]) -> None:
    if _has_state(tool) and "attributes" not in state:
        set_state(tool, state)
        return
    for name, value in state.get("attributes", {}).items():
        setattr(tool, name, copy.deepcopy(value))
    for name, value in state.get("inside", {}).items():
        inner = getattr(tool, name, None)
        if not _has_state(inner):
            raise CheckpointError(
                f"{type(tool).__name__}.{name} has a state in this checkpoint, and is {inner!r} now: make it in the "
                "__init__ of the experiment, before the state is restored, not in worker_loop."
            )
        set_state(inner, value)


def footprints(tool: Any, elsewhere: Set[int] = frozenset()) -> dict[str, bytes]:
    """Of the attributes that no checkpoint holds, what they look like now: if that changes, something will be lost."""
    if _has_state(tool):
        return {}
    found = {}
    for name, value in _held(tool).items():
        if not is_holdable(value) and not _has_state(value) and id(value) not in elsewhere:
            with contextlib.suppress(Exception):  # what cannot be pickled is a file, a thread, a lock: no state
                found[name] = hashlib.blake2b(pickle.dumps(value)).digest()
    return found


def state_of(value: Any) -> dict[str, Any]:
    """A metric's own `state_dict` is empty unless somebody has asked for more."""
    if is_measure(value):
        return {"counted": states_of({"it": value})["it"]}
    return {"state_dict": value.state_dict()} if _has_state(value) else {"value": value}


def set_state(value: Any, state: Mapping[str, Any]) -> None:
    if "counted" in state:
        restore_states({"it": value}, {"it": state["counted"]})
    elif "state_dict" in state:
        value.load_state_dict(state["state_dict"])


def read_path(owner: Any, path: str) -> Any:
    """The state of what an attribute path leads to."""
    return state_of(_reach(owner, path))


def write_path(owner: Any, path: str, state: Mapping[str, Any]) -> None:
    *way, name = path.split(".")
    holder = _reach(owner, ".".join(way)) if way else owner
    if "value" in state:
        setattr(holder, name, state["value"])
    else:
        set_state(getattr(holder, name), state)


def _held(tool: Any) -> dict[str, Any]:
    return vars(tool) if hasattr(tool, "__dict__") else {}


def _has_state(value: Any) -> bool:
    return not isinstance(value, type) and all(
        callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict")
    )


def _is_part(value: Any, elsewhere: Set[int]) -> bool:
    return _has_state(value) and id(value) not in elsewhere


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
