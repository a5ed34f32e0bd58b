"""What the measurements mean: the bottleneck, and what to do about it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ADVICE = {
    "dataloader": "Training waits for data. Give the loader more processes (num_workers), let it prefetch, store the "
    "data decoded, or do less for each row.",
    "to_device": "Batches travel slowly to the device: pin_memory=True in the loader, smaller types (uint8 images).",
    "backward": "The backward pass, with the exchange of gradients among ranks, takes most. Larger batches, fewer "
    "exchanges (aggregation_frequency), mixed precision.",
    "forward": "The model's forward pass takes most: that is what training is for. Mixed precision, torch.compile, or "
    "more ranks make it shorter.",
    "step": "The optimizer takes most: fused=True or foreach=True for torch's optimizers, or larger batches.",
    "validation": "Validation takes most: validate less often (validation_period), or on fewer rows.",
    "checkpoint": "Saving takes most: save less often (checkpoint_period).",
    "report": "Reporting takes most: report less often (reporting_period).",
}
_OTHER = "other"
_BUSY_PERCENT = 90.0


@dataclass(frozen=True)
class Line:
    name: str
    total_s: float
    mean_ms: float
    share: float


@dataclass(frozen=True)
class Verdict:
    """`lines` are the parts of a step, the longest first; `bottleneck` is the first that has a name."""

    num_steps: int
    elapsed_s: float
    lines: tuple[Line, ...]
    bottleneck: str | None
    advice: str

    def __str__(self) -> str:
        if not self.lines:
            return "Nothing was measured."
        rows = [f"{'part':<14}{'total':>10}{'a step':>12}{'share':>8}"]
        rows += [
            f"{line.name:<14}{line.total_s:>8.2f} s{line.mean_ms:>9.3f} ms{line.share:>8.0%}" for line in self.lines
        ]
        steps = "1 step" if self.num_steps == 1 else f"{self.num_steps} steps"
        rows.append(f"{steps} in {self.elapsed_s:.2f} s. {self.advice}")
        return "\n".join(rows)


def judge(sums: Mapping[str, float], num_steps: int, elapsed_s: float, samples: Sequence[Mapping[str, Any]]) -> Verdict:
    """`sums` has seconds by part; what no part has taken of the time is "other"."""
    rest = max(0.0, elapsed_s - sum(sums.values()))
    parts = {**sums, **({_OTHER: rest} if rest > 0.01 * elapsed_s else {})}
    whole = sum(parts.values()) or 1.0
    lines = tuple(
        Line(name, total, 1e3 * total / max(1, num_steps), total / whole)
        for name, total in sorted(parts.items(), key=lambda item: -item[1])
    )
    bottleneck = next((line.name for line in lines if line.name != _OTHER), None)
    return Verdict(num_steps, elapsed_s, lines, bottleneck, _advice(bottleneck, samples))


def _advice(bottleneck: str | None, samples: Sequence[Mapping[str, Any]]) -> str:
    said = [] if bottleneck is None else [f"The bottleneck is {bottleneck!r}."]
    if bottleneck in ADVICE:
        said.append(ADVICE[bottleneck])
    busy = [float(sample["cpu_percent"]) for sample in samples if "cpu_percent" in sample]
    if bottleneck == "dataloader" and busy and sum(busy) / len(busy) > _BUSY_PERCENT:
        said.append(f"The processor is {sum(busy) / len(busy):.0f} % busy, so more processes would not help.")
    return " ".join(said)
