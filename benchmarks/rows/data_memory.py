"""2.7 GB of shuffled rows through 2 workers: how much memory a worker takes for it, as a curve."""

import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.figures import Figure, Row, Unit, judged
from benchmarks.marks import Mark, the
from benchmarks.reading import write_numbers
from benchmarks.rounds import Effort
from benchmarks.systems import run_script

NUM_ROWS = 32_000_000
MEGABYTES = Unit("MB", 1e-6)
SHARE = 10
"""The data is so many times the memory that a worker may take for it."""

_curves: list[Mark] = []
"""Of the latest measurement, for the picture of it: a row has no place for them."""


def measure(effort: Effort, say: Callable[[str], None]) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="bench_data_") as folder:
        say("writing 2.7 GB")
        write_numbers(Path(folder), NUM_ROWS)
        num_bytes = sum(path.stat().st_size for path in Path(folder).iterdir())
        say("reading them")
        _curves[:] = the("memory", run_script("read_much.py", path=folder).marks, 2)
    ours = Figure("Paceline", tuple(max(_extra(one)) for one in _curves))
    early, late = (max(max(_part(one, place)) for one in _curves) for place in (2, 9))
    return [
        Row(
            f"the most memory that one of 2 workers takes to read {num_bytes / 1e9:.1f} GB, shuffled: over its start",
            MEGABYTES,
            ours,
            target=f"≤ 1/{SHARE} of the data, and flat",
            is_met=judged(ours, lambda value: value <= num_bytes / SHARE) and late <= early * 1.1,
            note=f"in the third tenth of the time {MEGABYTES.show(early)}, in the last {MEGABYTES.show(late)}",
        )
    ]


def _extra(one: Mark) -> list[float]:
    return [resident - one["before"] for _, resident in one["samples"]]


def _part(one: Mark, place: int) -> list[float]:
    """One of ten equal parts of the time."""
    extra = _extra(one)
    return extra[place * len(extra) // 10 : (place + 1) * len(extra) // 10] or extra


def draw(rows: list[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    chart, axis = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for one in _curves:
        times = [at for at, _ in one["samples"]]
        axis.plot(times, [value * MEGABYTES.scale for value in _extra(one)], label=f"rank {one['rank']}")
    axis.set(xlabel="s", ylabel="memory over that at the start (MB)", ylim=(0, None))
    axis.set_title(rows[0].what.partition(":")[0], fontsize="small")
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")
    chart.savefig(path, dpi=120)
    plt.close(chart)
