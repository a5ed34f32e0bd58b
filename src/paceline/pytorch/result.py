"""What `fit` returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from paceline.errors import TrainerStateError
from paceline.profiling.verdict import Verdict

Reason = Literal["finished", "stop requested", "preempted"]


@dataclass(frozen=True)
class TrainResult:
    """How far training has come, and why it ended; where its checkpoints are. The metrics of every report are in the
    run folder, not here: `metrics` reads them from there when asked."""

    reason: Reason
    batches: int
    epochs: int
    records: int
    latest_checkpoint: str | None = None
    best_checkpoint: str | None = None
    best_validation: float | None = None
    """The metric by which the best checkpoint is the best."""
    training_metrics: dict[str, Any] = field(default_factory=dict)
    """Of the last report."""
    validation_metrics: dict[str, Any] = field(default_factory=dict)
    """Of the last validation."""
    run_dir: Path | None = None
    profile: Verdict | None = None
    """What `configure_profiler` has found: the parts of a batch, the bottleneck, and what to do about it."""

    @property
    def metrics(self) -> Any:
        """The history, as `load_run(run_dir).metrics` has it: a data frame with a row for each report."""
        from paceline.runs import load_run

        if self.run_dir is None:
            raise TrainerStateError("The run folder is not known here: load_run(trainer.latest_run_dir) on the driver.")
        return load_run(self.run_dir).metrics
