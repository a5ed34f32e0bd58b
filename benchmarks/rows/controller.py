"""The driver's loop with 1 to 64 scripted workers: CPU time per step, as a curve."""

import statistics
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from benchmarks.figures import MICROSECONDS, Figure, Row
from benchmarks.rounds import Effort
from benchmarks.systems import run_script

COUNTS = (1, 2, 4, 8, 16, 32, 64)
TOLERANCE = 1.05
"""How much a doubling of the workers may add to the time per worker before it counts as growth, not as noise."""


def measure(effort: Effort, say: Callable[[str], None]) -> list[Row]:
    say(f"{', '.join(map(str, COUNTS))} workers")
    sizes = {"num_steps": 200, "num_rounds": 5} if effort.is_quick else {"num_steps": 1000, "num_rounds": 7}
    marks = run_script("control_scripted.py", counts=COUNTS, **sizes).marks
    *fewer, ours = [_figure(count, [one["seconds"] for one in marks if one["count"] == count]) for count in COUNTS]
    per_worker = [figure.value / count for figure, count in zip([*fewer, ours], COUNTS, strict=True)]
    growth = max(after / before for before, after in pairwise(per_worker))
    return [
        Row(
            f"the controller with {COUNTS[-1]} fake workers: the driver's CPU time for a step",
            MICROSECONDS,
            ours,
            tuple(fewer),
            target="grows no faster than the workers",
            is_met=growth <= TOLERANCE,
            note=f"twice the workers: at most {growth:.2f} times the time per worker",
            has_ratios=False,
        )
    ]


def _figure(count: int, samples: list[float]) -> Figure:
    per_worker = MICROSECONDS.show(statistics.median(samples) / count)
    return Figure(f"{count} workers" if count > 1 else "1 worker", tuple(samples), note=f"{per_worker} per worker")


def draw(rows: list[Row], path: Path) -> None:
    """The curve, beside one that grows as the workers do."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    (row,) = rows
    times_us = [figure.value * 1e6 for figure in (*row.peers, row.ours)]
    chart, axis = plt.subplots(figsize=(6, 3.6), layout="constrained")
    axis.plot(COUNTS, times_us, marker="o", color="#2a6fbb", label="measured")
    axis.plot(
        COUNTS, [times_us[0] * count for count in COUNTS], "--", color="#999999", label="growing as the workers do"
    )
    axis.set(xscale="log", yscale="log", xlabel="workers", ylabel="driver CPU time per step (µs)")
    axis.set_xticks(COUNTS, [str(count) for count in COUNTS])
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    axis.legend()
    chart.savefig(path, dpi=120)
    plt.close(chart)
