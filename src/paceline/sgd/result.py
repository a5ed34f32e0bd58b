"""What `step` returns: a float, with all that is known of the step."""

from collections.abc import Mapping, Sequence
from typing import Any


class StepResult(float):
    """The loss, as the mean over all replicas. It is a float, so `print("loss", sgd.step())` shows a number; and a
    little of a dict, as in `result["loss"]` and `result["accuracy"]`."""

    losses: list[float]
    """Of every replica: those of worker 0, by device, then those of worker 1 …"""
    metrics: dict[str, Any]
    """What the models' `get_metrics` gave: numbers as the mean over the replicas."""
    timings: dict[str, Any]
    """Seconds: "compute_grads", "grad_reduce" and "apply_grads" as the driver saw them, "step" for all of it, and
    "compute_grads_by_worker", "apply_grads_by_worker" as lists."""
    step: int
    """Its number, from 1 on."""

    def __new__(
        cls, losses: Sequence[float], metrics: Mapping[str, Any], timings: Mapping[str, Any], step: int
    ) -> "StepResult":
        self = super().__new__(cls, sum(losses) / len(losses) if losses else float("nan"))
        self.losses, self.metrics, self.timings, self.step = list(losses), dict(metrics), dict(timings), step
        return self

    def __getitem__(self, name: str) -> Any:
        return float(self) if name == "loss" else self.metrics[name]

    def __contains__(self, name: object) -> bool:
        return name == "loss" or name in self.metrics

    def keys(self) -> list[str]:
        """With which `dict(result)` has the loss and the metrics."""
        return ["loss", *(name for name in self.metrics if name != "loss")]

    def __reduce__(self) -> tuple[Any, ...]:
        return StepResult, (self.losses, self.metrics, self.timings, self.step)


def timing_lines(timings: Mapping[str, Any]) -> list[str]:
    """One step, as it is printed: what each worker took, then all of them, phase by phase. The reduction is not there
    when there was nothing to reduce, on a single worker."""
    lines = [f"compute grad interior time {seconds}" for seconds in timings["compute_grads_by_worker"]]
    lines.append(f"compute all grads time {timings['compute_grads']}")
    if "grad_reduce" in timings:
        lines.append(f"grad reduce time {timings['grad_reduce']}")
    lines += [f"apply grad interior time {seconds}" for seconds in timings["apply_grads_by_worker"]]
    lines.append(f"apply all grads time {timings['apply_grads']}")
    return lines
