"""What the driver spends on a step, for more and more workers: as a row and as a curve."""

import math
import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

from benchmarks.figures import MICROSECONDS, Figure, Row
from benchmarks.marks import Mark

COUNTS = (1, 2, 4, 8, 16, 32, 64)
TOLERANCE = 1.05
"""What still counts as growth in proportion to the workers, and not as more."""

NUM_LAST = 4

Judge = Callable[[Sequence[int], Sequence[float]], tuple[float, str]]
"""From the numbers of workers and the times: a number that is 1 if both grow alike, and the same in words."""


def worst_doubling(counts: Sequence[int], times: Sequence[float]) -> tuple[float, str]:
    """For times that hardly vary."""
    per_worker = [time / count for count, time in zip(counts, times, strict=True)]
    growth = max(after / before for before, after in pairwise(per_worker))
    return growth, f"twice the workers: at most {growth:.2f} times the time per worker"


def last_slope(counts: Sequence[int], times: Sequence[float]) -> tuple[float, str]:
    """For times that vary: a slope forgives one bad point. Of the last points, since what does not depend on the
    workers makes the first ones lie flatter."""
    logs = [[math.log(value) for value in values[-NUM_LAST:]] for values in (counts, times)]
    slope = statistics.linear_regression(*logs).slope
    return slope, f"from {counts[-NUM_LAST]} workers on, it grows as their number to the power of {slope:.2f}"


def growth_row(what: str, marks: Sequence[Mark], counts: Sequence[int], judge: Judge) -> Row:
    """From marks with the time of a step and the number of workers. Ours is the figure of the largest number."""
    samples = {count: [one["seconds"] for one in marks if one["count"] == count] for count in counts}
    *fewer, ours = [_figure(count, samples[count]) for count in counts]
    growth, note = judge(counts, [statistics.median(samples[count]) for count in counts])
    return Row(
        what.format(count=counts[-1]),
        MICROSECONDS,
        ours,
        tuple(fewer),
        target="grows no faster than the workers",
        is_met=growth <= TOLERANCE,
        note=note,
        has_ratios=False,
    )


def _figure(count: int, samples: list[float]) -> Figure:
    per_worker = MICROSECONDS.show(statistics.median(samples) / count)
    return Figure(f"{count} workers" if count > 1 else "1 worker", tuple(samples), note=f"{per_worker} per worker")


def draw_growth(rows: list[Row], path: Path) -> None:
    """A curve for each row, beside one that grows as the workers do."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    chart, axis = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for row in rows:
        times_us = [figure.value * 1e6 for figure in (*row.peers, row.ours)]
        counts = COUNTS[: len(times_us)]
        (line,) = axis.plot(counts, times_us, marker="o", label=row.what.split(":")[0])
        axis.plot(counts, [times_us[0] * count for count in counts], "--", color=line.get_color(), alpha=0.4)
    axis.plot([], [], "--", color="#999999", label="growing as the workers do")
    axis.set(xscale="log", yscale="log", xlabel="workers", ylabel="driver CPU time per step (µs)")
    axis.set_xticks(counts, [str(count) for count in counts])
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")
    chart.savefig(path, dpi=120)
    plt.close(chart)
