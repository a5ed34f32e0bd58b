"""A profile as a picture: where the time of steps went, and what the machine did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def draw(samples: Sequence[Mapping[str, Any]], path: Path) -> None:
    """One point for each sample. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = sorted({name for sample in samples for name in sample["parts_s"]})
    chart, (upper, lower) = plt.subplots(2, 1, figsize=(7, 5), sharex=True, layout="constrained")
    per_step = [
        [1e3 * sample["parts_s"].get(name, 0.0) / max(1, sample["steps"]) for sample in samples] for name in names
    ]
    places = range(len(samples))
    if names:
        upper.stackplot(places, per_step, labels=names)
        upper.legend(fontsize="small", loc="upper right")
    upper.set(ylabel="ms a step")
    for name in ("cpu_percent", "process_cpu_percent"):
        lower.plot(places, [sample.get(name, 0.0) for sample in samples], label=name.replace("_", " "))
    for name in sorted({name for sample in samples for name in sample if name.endswith("_percent") and "gpu" in name}):
        lower.plot(places, [sample.get(name, 0.0) for sample in samples], label=name.replace("_", " "))
    lower.set(ylabel="%", xlabel="sample", ylim=(0, None))
    lower.legend(fontsize="small")
    chart.savefig(path, dpi=110)
    plt.close(chart)
