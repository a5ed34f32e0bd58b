"""The driver's loop with 1 to 64 scripted workers: CPU time per step, as a curve."""

import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.figures import MICROSECONDS, Figure, Row, judged
from benchmarks.marks import MARKS_FILE, read_marks
from benchmarks.processes import environment, run_process
from benchmarks.rounds import Effort
from benchmarks.systems import SCRIPTS

COUNTS = (1, 2, 4, 8, 16, 32, 64)
TOLERANCE = 1.05
"""How much one doubling may add to the time per worker before it counts as growth, not as noise."""


def measure(effort: Effort, say: Callable[[str], None]) -> list[Row]:
    say(f"{', '.join(map(str, COUNTS))} workers")
    curve = _curve(num_steps=200 if effort.is_quick else 1000, num_rounds=2 if effort.is_quick else 7)
    medians = [statistics.median(curve[count]) for count in COUNTS]
    per_worker = [time_s / count for time_s, count in zip(medians, COUNTS, strict=True)]
    growth = max(after / before for before, after in zip(per_worker, per_worker[1:], strict=False))
    ours = Figure("Paceline", tuple(curve[COUNTS[-1]]))
    return [
        Row(
            f"the controller with {COUNTS[-1]} fake workers: driver CPU time per step",
            MICROSECONDS,
            ours,
            tuple(Figure(f"with {count} of them", tuple(curve[count])) for count in COUNTS[:-1]),
            target="grows no faster than the workers",
            is_met=judged(ours, lambda value: growth <= TOLERANCE),
            note=f"per worker and step: {_shown(per_worker)}; at most {growth:.2f} times as much after a doubling",
            picture=_draw(medians),
        )
    ]


def _curve(num_steps: int, num_rounds: int) -> dict[int, list[float]]:
    """Seconds of CPU time per step, for each number of workers."""
    folder = Path(tempfile.mkdtemp(prefix="controller_"))
    try:
        marks_path = folder / "marks.jsonl"
        environ = environment(**{MARKS_FILE: str(marks_path), "PACELINE_RESULTS": str(folder / "runs")})
        spec = json.dumps({"counts": COUNTS, "num_steps": num_steps, "num_rounds": num_rounds})
        run_process([sys.executable, str(SCRIPTS / "control_scripted.py"), spec], environ, folder)
        marks = read_marks(marks_path)
        return {count: [one["seconds"] for one in marks if one["count"] == count] for count in COUNTS}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _shown(per_worker: list[float]) -> str:
    return ", ".join(f"{time_s * 1e6:.1f} µs ({count})" for count, time_s in zip(COUNTS, per_worker, strict=True))


def _draw(medians: list[float]) -> Callable[[Path], None]:
    def draw(path: Path) -> None:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        figure, axis = plt.subplots(figsize=(6, 3.6), layout="constrained")
        axis.plot(COUNTS, [time_s * 1e6 for time_s in medians], marker="o", color="#2a6fbb", label="measured")
        linear = [medians[0] * 1e6 * count for count in COUNTS]
        axis.plot(COUNTS, linear, linestyle="--", color="#999999", label="as fast as the workers grow")
        axis.set(xscale="log", yscale="log", xlabel="workers", ylabel="driver CPU time per step (µs)")
        axis.set_xticks(COUNTS, [str(count) for count in COUNTS])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend()
        figure.savefig(path, dpi=120)
        plt.close(figure)

    return draw
