"""What a checkpoint keeps of tools, and of attributes that an experiment has registered."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import math
import pickle
from collections import defaultdict, deque
from collections.abc import Mapping, Set
from typing import Any

import torch

from paceline.checkpoints.content.tree import Encoder
from paceline.errors import ArgumentError, CheckpointError, CheckpointValueError
from paceline.experiment.measures import is_measure
from paceline.prepare import unwrap_model

_NOTHING: Set[int] = frozenset()


def is_holdable(value: Any) -> bool:
    """Whether a checkpoint can hold it: by the word of who writes checkpoints. Nothing is copied."""
    try:
        Encoder().encode(value)
    except CheckpointValueError:
        return False
    return True


def has_state(value: Any) -> bool:
    """Whether it says itself what is to be kept."""
    return not isinstance(value, type) and all(
        callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict")
    )


def attributes(tool: Any) -> dict[str, Any]:
    """What a tool without a state of its own remembers: its attributes, as far as a checkpoint can hold them."""
    held = {name: _plain(value) for name, value in _held(tool).items()}
    return {name: value for name, value in held.items() if is_holdable(value)}


def changes(tool: Any, first: Mapping[str, Any], elsewhere: Set[int] = _NOTHING) -> dict[str, Any]:
    """What a tool has come to remember since it was made. What it was configured with is not among it: who goes on with
    another patience means it. `elsewhere` are the ids of what it may hold and other parts of the checkpoint have."""
    if has_state(tool):
        return {"state_dict": tool.state_dict()}
    now = attributes(tool)
    changed = {name: value for name, value in now.items() if not _is_same(value, first.get(name, ...))}
    states = {name: part.state_dict() for name, part in _inside(tool, elsewhere).items()}
    inside = {name: state for name, state in states.items() if is_holdable(state)}
    return {"attributes": changed, **({"inside": inside} if inside else {})}


def put_back(tool: Any, state: Mapping[str, Any], elsewhere: Set[int] = _NOTHING) -> list[str]:
    """Gives the names of what has a state and is not there: somebody made it later."""
    if "state_dict" in state:
        tool.load_state_dict(state["state_dict"])
    for name, value in state.get("attributes", {}).items():
        setattr(tool, name, _as_before(copy.deepcopy(value), getattr(tool, name, None)))
    parts = _inside(tool, elsewhere)
    for name in state.get("inside", {}).keys() & parts.keys():
        parts[name].load_state_dict(state["inside"][name])
    return sorted(state.get("inside", {}).keys() - parts.keys())


def footprints(tool: Any, elsewhere: Set[int] = _NOTHING) -> dict[str, bytes]:
    """By name, what those of its attributes look like that no checkpoint holds as they are."""
    found = {name: b"" for name in _inside(tool, elsewhere)}
    for name, value in _held(tool).items():
        if not (is_holdable(_plain(value)) or has_state(value) or id(value) in elsewhere):
            with contextlib.suppress(Exception):  # what cannot be pickled is a file, a thread, a lock: no state
                found[name] = hashlib.blake2b(pickle.dumps(value)).digest()
    return found


def losses(tool: Any, first: Mapping[str, bytes], elsewhere: Set[int] = _NOTHING) -> list[str]:
    """What a restart would lose of it, since it began with `first` footprints: what has changed and cannot be held,
    and what has a state but was not there."""
    parts = _inside(tool, elsewhere)
    unheld = {name for name, part in parts.items() if not is_holdable(part.state_dict())}
    now = footprints(tool, elsewhere)
    return sorted(unheld | {name for name, one in now.items() if first.get(name) != one})


def read_path(owner: Any, path: str) -> Any:
    """The state of what an attribute path leads to. What a metric has counted is kept with the other metrics."""
    value = reach(owner, path)
    return {"state_dict": value.state_dict()} if has_state(value) else {"value": _plain(value)}


def write_path(owner: Any, path: str, state: Mapping[str, Any]) -> None:
    *way, name = path.split(".")
    holder = reach(owner, ".".join(way)) if way else owner
    if "state_dict" in state:
        getattr(holder, name).load_state_dict(state["state_dict"])
    else:
        setattr(holder, name, _as_before(state["value"], getattr(holder, name, None)))


def reach(owner: Any, path: str) -> Any:
    """What an attribute path leads to."""
    for name in path.split("."):
        if not hasattr(owner, name):
            raise ArgumentError(f"register_stateful({path!r}): {type(owner).__name__} has no attribute {name!r}.")
        owner = getattr(owner, name)
    return owner


def _held(tool: Any) -> dict[str, Any]:
    return vars(tool) if hasattr(tool, "__dict__") and not has_state(tool) else {}


def _inside(tool: Any, elsewhere: Set[int]) -> dict[str, Any]:
    """Its attributes that have a state of their own: a scheduler of torch, a model that it averages weights in."""
    found = {name: unwrap_model(one) if isinstance(one, torch.nn.Module) else one for name, one in _held(tool).items()}
    return {
        name: one for name, one in found.items() if has_state(one) and id(one) not in elsewhere and not is_measure(one)
    }


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


def _is_same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one is other or torch.equal(one, other)
    try:
        return bool(one == other)
    except (ValueError, RuntimeError, TypeError):  # containers of arrays
        return False


# --- what a checkpoint is asked for -----------------------------------------------------------------------------------


def scored(name: str | None, values: Mapping[str, Any], is_inside: bool) -> dict[str, Any]:
    """What ranks a checkpoint, by `cfg.best_metric`. In the middle of an epoch there may be no such value yet: then it
    is the worst."""
    if name is None:
        return {}
    if name not in values and not is_inside:
        raise ArgumentError(
            f"cfg.best_metric is {name!r}, but save_checkpoint got no such value among its metrics "
            f"({', '.join(values) or 'none'}). Give it, or name one of these."
        )
    return {name: values.get(name, math.nan)}


def check_names(checkpoint: Mapping[str, Any], parts: Mapping[str, Mapping[str, Any]]) -> None:
    """CheckpointError if it is not of such an experiment: `parts` has the models and optimizers, by name."""
    if not {"models", "optimizers", "epoch", "batch_idx", "kept"} <= checkpoint.keys():
        raise CheckpointError(
            f"This checkpoint has {', '.join(checkpoint)}; expected one that an experiment's save_checkpoint wrote."
        )
    for what, mine in parts.items():
        if checkpoint[what].keys() != mine.keys():
            raise CheckpointError(
                f"This checkpoint has the {what} {', '.join(checkpoint[what]) or 'none'}; the experiment has "
                f"{', '.join(mine) or 'none'}."
            )
