"""The driver with 1 to 64 workers on Ray that only report: CPU time per step, as a curve."""

from collections.abc import Callable

from benchmarks.figures import Row
from benchmarks.growth import COUNTS, draw_growth, growth_row, last_slope
from benchmarks.rounds import Effort
from benchmarks.systems import run_script

draw = draw_growth

PACES = {
    "every 50 ms": {"pause_s": 0.05, "num_steps": 100},  # each report travels alone
    "as fast as they can": {"pause_s": 0.0, "num_steps": 5000},  # many travel together
}


def measure(effort: Effort, say: Callable[[str], None]) -> list[Row]:
    counts = [count for count in COUNTS if count <= 16 or not effort.is_quick]
    say(f"{', '.join(map(str, counts))} workers")
    num_rounds = 1 if effort.is_quick else 3
    marks = run_script(
        "control_ray_workers.py", timeout_s=1800, counts=counts, paces=PACES, num_rounds=num_rounds
    ).marks
    return [
        growth_row(
            f"workers on Ray that report {pace}: the driver's CPU time for a step of {{count}}",
            [one for one in marks if one["name"] == pace],
            counts,
            last_slope,
        )
        for pace in PACES
    ]
