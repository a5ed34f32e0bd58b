"""What was asked of a run, checked."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from paceline.checkpoints import CheckpointStrategy
from paceline.control.failure import Budget
from paceline.data import Source


@dataclass(frozen=True)
class Plan:
    """One call of `Trainer.run`: what it does not change while it is being done."""

    fn: Callable[..., Any]
    config: dict[str, Any]
    takes_config: bool
    checkpoint: str | dict[str, Any] | None
    checkpoint_root: str
    strategy: CheckpointStrategy
    source: Source | None = None
    first_checkpoint_id: int = 1
    """Checkpoints in the folder with a lower id are none of this run's."""
    budget: Budget = field(default_factory=Budget)
    grace_s: float = 30.0
    hang_timeout_s: float | None = None
    detailed_metrics: bool = False
    in_step: bool = False
    """Whether `report` waits until the next step is asked for, so that nobody trains further than was decided."""
    first_iteration: int = 0
    """How many steps were made, elsewhere or earlier, before `checkpoint` was saved."""
    abandoned: str = "the iterator over the results was abandoned"
    """What the run folder gives as the reason when the caller drops the run."""
