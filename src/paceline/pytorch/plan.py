"""What `fit` was asked for, as a value: periods, policy, and what is due after a batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from paceline.errors import ArgumentError
from paceline.pytorch.units import Batch, Lengths, TrainUnit, check_length, check_period, more

EVERY_100 = Batch(100)
POLICIES = ("best", "all", "none")
GUESSES = ("validation_loss", "val_loss", "loss")
"""By which "best" is decided if nobody says: the first of these that there is, or the only metric."""


@dataclass(frozen=True)
class Plan:
    max_length: TrainUnit
    checkpoint_period: TrainUnit | None = None
    validation_period: TrainUnit | None = None
    reporting_period: TrainUnit | None = EVERY_100
    checkpoint_policy: str = "best"
    metric: str | None = None
    smaller_is_better: bool = True
    step_zero_validation: bool = False
    is_test: bool = False

    def __post_init__(self) -> None:
        check_length("max_length", self.max_length)
        for name in ("checkpoint_period", "validation_period", "reporting_period"):
            check_period(name, getattr(self, name))
        if self.checkpoint_policy not in POLICIES:
            raise ArgumentError(
                f"checkpoint_policy={self.checkpoint_policy!r}: expected one of {', '.join(map(repr, POLICIES))}."
            )

    def as_test(self, lengths: Lengths) -> Plan:
        """One further batch of training, one of validation, one checkpoint."""
        once = replace(self, max_length=more(Batch(1), lengths), step_zero_validation=False, is_test=True)
        return replace(once, checkpoint_period=None, validation_period=None, reporting_period=None)

    def due(self, before: Lengths, after: Lengths) -> Due:
        """After the batch between these two."""
        validation, checkpoint, report = self.validation_period, self.checkpoint_period, self.reporting_period
        is_over = self.max_length.is_over(after)
        is_validated = validation is not None and validation.is_due(before, after)
        is_saved = checkpoint is not None and checkpoint.is_due(before, after)
        is_told = report is not None and report.is_due(before, after)
        if not (is_over or is_validated or is_saved or is_told):
            return NOTHING
        return Due(is_over, is_validated, is_saved, is_told)

    def score_name(self, metrics: dict[str, Any]) -> str | None:
        """Of the validation metric that decides what is best; None if that cannot be told."""
        if self.metric is not None:
            if self.metric not in metrics:
                raise ArgumentError(
                    f"metric={self.metric!r} decides which checkpoint is best, and validation has no such metric; it "
                    f"has {', '.join(map(repr, metrics))}."
                )
            return self.metric
        if len(metrics) == 1:
            return next(iter(metrics))
        return next((name for name in GUESSES if name in metrics), None)


@dataclass(frozen=True)
class Due:
    """What is to be done after a batch."""

    end: bool
    validation: bool
    checkpoint: bool
    report: bool

    def __bool__(self) -> bool:
        return self.end or self.validation or self.checkpoint or self.report


NOTHING = Due(False, False, False, False)


def reported_names(metrics: dict[str, Any]) -> dict[str, Any]:
    """Of a validation, so that they are not taken for those of training."""
    return {name if name.startswith("val") else f"val_{name}": value for name, value in metrics.items()}
