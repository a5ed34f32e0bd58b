"""What a script tells of its training through `core`: metrics by group, progress, and how it ends.

    report_training_metrics(10, {"loss": 0.5})      {"steps_completed": 10, "loss": 0.5}
    report_validation_metrics(10, {"loss": 0.4})    {"steps_completed": 10, "validation/loss": 0.4}
    report_metrics("test", 10, {"loss": 0.3})       {"steps_completed": 10, "test/loss": 0.3}

Each call is one `paceline.report`, so a line of metrics.jsonl: the k-th calls of all ranks make one step. Call them
equally often on every rank, or on the chief alone.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from paceline import session
from paceline.errors import ArgumentError, ArgumentTypeError
from paceline.rank_session import Session

STEPS = "steps_completed"
TRAINING, VALIDATION = "training", "validation"
_MOST_REMEMBERED = 10_000


class EarlyExitReason(StrEnum):
    INVALID_HP = "INVALID_HP"
    USER_REQUESTED_STOP = "USER_REQUESTED_STOP"


class TrainContext:
    """On any rank, from one thread at a time."""

    def __init__(self, running: Session):
        self._session = running
        self._reported: dict[tuple[str, int], frozenset[str]] = {}
        """The metrics that were reported, of the latest steps of all groups."""

    def report_training_metrics(self, steps_completed: int, metrics: Mapping[str, Any]) -> None:
        self.report_metrics(TRAINING, steps_completed, metrics)

    def report_validation_metrics(self, steps_completed: int, metrics: Mapping[str, Any]) -> None:
        self.report_metrics(VALIDATION, steps_completed, metrics)

    def report_metrics(self, group: str, steps_completed: int, metrics: Mapping[str, Any]) -> None:
        """Report metrics of a group, after so many steps of the training. A group's name has no dots, and the same
        metric cannot be reported twice for one step: ArgumentError."""
        _check_report(group, steps_completed, metrics)
        key = (group, steps_completed)
        former = self._reported.get(key, frozenset())
        if again := sorted(former & metrics.keys()):
            raise ArgumentError(
                f"report_metrics({group!r}, {steps_completed}, ...): {', '.join(again)} of this step was reported "
                "before. Report a metric once for each step, or under another name."
            )
        prefix = "" if group == TRAINING else f"{group}/"
        self._session.report({STEPS: steps_completed, **{f"{prefix}{name}": one for name, one in metrics.items()}})
        self._reported[key] = former | metrics.keys()
        if len(self._reported) > _MOST_REMEMBERED:
            del self._reported[next(iter(self._reported))]

    def report_progress(self, progress: float) -> None:
        """How much of the training is done, from 0 to 1. The chief's is shown."""
        session.report_progress(progress)

    def report_early_exit(self, reason: EarlyExitReason | str) -> None:
        """Why the script ends before its time, for events.jsonl."""
        self._session.note("early_exit", reason=str(reason))

    def set_status(self, status: str) -> None:
        """What the training is doing, for events.jsonl."""
        self._session.note("status", text=str(status))


def _check_report(group: str, steps_completed: int, metrics: Mapping[str, Any]) -> None:
    if not isinstance(group, str) or not group or "." in group:
        raise ArgumentError(f"report_metrics({group!r}, ...): expected a name without dots for the group.")
    if isinstance(steps_completed, bool) or not isinstance(steps_completed, int) or steps_completed < 0:
        raise ArgumentError(f"steps_completed={steps_completed!r}: expected a whole number from 0 on.")
    if not isinstance(metrics, Mapping) or not all(isinstance(name, str) for name in metrics):
        raise ArgumentTypeError(f"metrics is {metrics!r}; expected a dict with names as its keys.")
    if STEPS in metrics and group == TRAINING:
        raise ArgumentError(f"A metric cannot be called {STEPS!r}: that is the number of steps itself.")
