"""The driver's loop with 1 to 64 scripted workers: CPU time per step, as a curve."""

from collections.abc import Callable

from benchmarks.figures import Row
from benchmarks.growth import COUNTS, draw_growth, growth_row, worst_doubling
from benchmarks.rounds import Effort
from benchmarks.systems import run_script

draw = draw_growth


def measure(effort: Effort, say: Callable[[str], None]) -> list[Row]:
    say(f"{', '.join(map(str, COUNTS))} workers")
    sizes = {"num_steps": 200, "num_rounds": 5} if effort.is_quick else {"num_steps": 1000, "num_rounds": 7}
    marks = run_script("control_scripted.py", counts=COUNTS, **sizes).marks
    what = "the controller with {count} fake workers: the driver's CPU time for a step"
    return [growth_row(what, marks, COUNTS, worst_doubling)]
