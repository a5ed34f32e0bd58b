"""Checkpoints of a trial: what one has, and which of them is best."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline import session
from paceline.checkpoints import CheckpointStrategy
from paceline.checkpoints.checkpoint import Checkpoint
from paceline.checkpoints.content.tree import Encoder
from paceline.errors import ArgumentError, CheckpointValueError, TrainerStateError
from paceline.prepare.reproducibility import set_rng_state
from paceline.pytorch.units import Lengths
from paceline.rank_session import Session

logger = logging.getLogger(__name__)

SCORE = "score"


@dataclass(frozen=True)
class Found:
    lengths: Lengths
    seed: int


def found_in(checkpoint: Mapping[str, Any]) -> Found:
    """ArgumentError if it is not of a trial."""
    try:
        numbers = [int(checkpoint[name]) for name in ("batches", "epochs", "records", "seed")]
        _ = checkpoint["models"], checkpoint["optimizers"]
    except (KeyError, TypeError, ValueError) as error:
        raise ArgumentError(
            f"The checkpoint {getattr(checkpoint, 'path', None) or ''} was not saved by a pytorch.Trainer: it has "
            f"{', '.join(map(repr, checkpoint)) or 'nothing'}. For other weights, load them into the model by yourself."
        ) from error
    for name, expected in _KINDS.items():
        if name in checkpoint and not _is_kind(checkpoint[name], expected):
            raise ArgumentError(
                f"The checkpoint {getattr(checkpoint, 'path', None) or ''} of a pytorch.Trainer is damaged: {name} is "
                f"of type {type(checkpoint[name]).__name__}; expected {expected}. Go on from another one."
            )
    return Found(Lengths(*numbers[:3]), numbers[3])


_KINDS = {
    **dict.fromkeys(("models", "optimizers", "lr_schedulers"), "a list of states"),
    **dict.fromkeys(("scaler", "callbacks", "validation", "best", "trial"), "a state"),
    **dict.fromkeys(("epochs_ended", "in_epoch", "validated_at"), "a number"),
}


def _is_kind(value: Any, expected: str) -> bool:
    if expected == "a list of states":
        return isinstance(value, list | tuple) and all(isinstance(one, Mapping) for one in value)
    return isinstance(value, Mapping if expected == "a state" else int)


@dataclass(frozen=True)
class Kept:
    """What ranks had of their own: positions in the data of all of them, and this one's random numbers, if there are as
    many ranks as there were."""

    feeds: list[Any]
    gradients: list[Any]
    """That wait for further batches: this rank's, or those of all ranks if there are not as many."""
    rng: dict[str, Any] | None
    random_ahead: dict[str, Any] | None
    """As they were before the batch was read that comes next, if that was read ahead."""
    path: str | None

    def restore_generators(self) -> None:
        if self.rng is not None:
            set_rng_state(self.rng)


def states_of_ranks(checkpoint: Mapping[str, Any]) -> Kept:
    parts = checkpoint.all_ranks if isinstance(checkpoint, Checkpoint) else []
    there = [part for part in parts if part]
    place = session.place()
    own = parts[place.world_rank] if len(parts) == place.world_size else None
    feeds = [part["feed"] for part in there if part.get("feed") is not None]
    waiting = [part["gradients"] for part in ([own] if own else there) if part.get("gradients") is not None]
    random = {} if own is None else own
    return Kept(feeds, waiting, random.get("rng"), random.get("random_ahead"), getattr(checkpoint, "path", None))


def storable(values: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint can hold of them: neither a class among hyperparameters nor a figure among metrics is worth a
    training that fails when it saves."""
    return {name: value for name, value in values.items() if _is_storable(value)}


def _is_storable(value: Any) -> bool:
    try:
        Encoder().encode(value)
    except CheckpointValueError:
        return False
    return True


class Score:
    """Of validations: the best so far, and which checkpoint has it. Checkpoints that are neither the best nor the
    latest are deleted, if that is wanted."""

    def __init__(self) -> None:
        self.best: float | None = None
        self.best_path: str | None = None
        self._smaller_is_better = True
        self._latest: float | None = None
        """Of the validation at this very batch."""
        self._keeps_best = self._has_warned = False

    def rank(self, smaller_is_better: bool, keeps_best: bool) -> None:
        """What is best from now on. With `keeps_best` that one and the latest are kept, and no other, from the first
        validation on that tells; unless the run was given a strategy."""
        self._smaller_is_better, self._keeps_best = smaller_is_better, keeps_best

    def take(self, name: str | None, metrics: Mapping[str, Any]) -> bool:
        """Whether this validation is the best so far. True also if it cannot be told, and then all checkpoints stay:
        better some too many. `name` is that of the metric which decides."""
        self._latest = None
        if self._keeps_best:
            self._choose(name, metrics)
        try:
            value = math.nan if name is None else float(metrics[name])
        except (TypeError, ValueError):
            value = math.nan
        if math.isnan(value):
            return True
        self._latest = value
        if self.best is not None and (value >= self.best if self._smaller_is_better else value <= self.best):
            return False
        self.best, self.best_path = value, None
        return True

    def _choose(self, name: str | None, metrics: Mapping[str, Any]) -> None:
        running = _running()
        if name is None and not self._has_warned and running.place.world_rank == 0:
            logger.warning(
                "Which checkpoint is best cannot be told of the metrics %s, so all are kept: name one, "
                "fit(metric=...).",
                ", ".join(metrics),
            )
        self._has_warned = self._has_warned or name is None
        if name is not None and running.strategy == CheckpointStrategy():
            order = "min" if self._smaller_is_better else "max"
            running.set_strategy(
                CheckpointStrategy(num_to_keep=1, checkpoint_score_attribute=SCORE, checkpoint_score_order=order)
            )

    def place(self, is_validated: bool) -> str:
        """Where the next checkpoint will be. Of equals the newest is the best, as for the strategy that deletes; so a
        checkpoint that is the best knows it, and whoever goes on from it does."""
        path = _running().next_checkpoint_path
        if is_validated and self._latest is not None and self._latest == self.best:
            self.best_path = path
        return path

    def save(self, state: dict[str, Any], directory: Path | None, own: dict[str, Any], is_validated: bool) -> None:
        score = math.nan if self._latest is None or not is_validated else self._latest
        _running().save_checkpoint({**state, SCORE: score}, directory, own)

    def settle(self) -> None:
        """Wait until what was saved counts."""
        _running().settle()

    def as_state(self) -> dict[str, Any]:
        return {"value": self.best, "path": self.best_path}

    @classmethod
    def of(cls, state: Any) -> Score:
        made = cls()
        if isinstance(state, Mapping):
            made.best, made.best_path = state.get("value"), state.get("path")
        return made


def _running() -> Session:
    running = session.current()
    if running is None:
        raise TrainerStateError("The trial is outside of its context: use it inside `with pytorch.init() as context`.")
    return running
