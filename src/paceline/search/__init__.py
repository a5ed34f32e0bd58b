"""Hyperparameter search: a training function as the trainable of a tuner."""

from importlib.util import find_spec
from typing import Any

from paceline.errors import ArgumentError, MissingDependencyError
from paceline.runs import RunRequest
from paceline.trainer import Trainer


def tune_trainable(trainer: Trainer, request: RunRequest, all_ranks: bool) -> type[Any]:
    """What `Trainer.to_tune_trainable` returns."""
    if trainer.num_workers == 0 or trainer.engine.name == "inline":
        raise ArgumentError(
            "num_workers=0 runs the function in the driver's own process, which Tune could not stop between two "
            "steps: give the Trainer num_workers=1 or more."
        )
    if request.checkpoint_strategy.num_to_keep == 0:
        raise ArgumentError(
            "checkpoint_strategy has num_to_keep=0, but Tune restores trials from the checkpoints on disk: keep at "
            "least one."
        )
    if find_spec("ray") is None:
        raise MissingDependencyError("ray", "ray", "to_tune_trainable()")
    try:
        from paceline.search.tune import make_trainable
    except ImportError as error:
        if (error.name or "").startswith("paceline"):
            raise
        raise MissingDependencyError("ray[tune]", "ray", "to_tune_trainable()") from error
    return make_trainable(trainer, request, all_ranks)
