"""A trial's loop against the same loop by hand, and those of Lightning and Hugging Face: the time of a step.

One process for short steps, two ranks for long ones. Each is timed inside, over the second half of its steps: while a
run begins, it writes down versions and the state of the code.
"""

from collections.abc import Callable

from benchmarks.figures import MICROSECONDS, Row, ratio_at_least
from benchmarks.marks import the
from benchmarks.rounds import Effort, in_turns
from benchmarks.systems import System, Torchrun, run_reader

SHORT = {"width": 64, "depth": 2, "batch_size": 32, "num_steps": 4000}
LONG = {"width": 256, "depth": 3, "batch_size": 64, "num_steps": 800}


def alone(name: str, package: str) -> System:
    return System(name, package, "step_a_model.py", (package,))


OURS, BARE = alone("Paceline trial", "paceline"), alone("bare loop", "torch")
LIGHTNING, HUGGING_FACE = alone("Lightning Trainer", "lightning"), alone("Hugging Face Trainer", "transformers")


def measure(effort: Effort, say: Callable[[str], None]) -> list[Row]:
    short = in_turns((OURS, BARE, LIGHTNING, HUGGING_FACE), lambda system: _steps_s(system, SHORT, 1), effort, say)
    two = tuple(Torchrun(one.name, one.package, one.script, ()) for one in (OURS, BARE))
    long = in_turns(two, lambda system: _steps_s(system, LONG, 2), effort, say)
    return [
        _row("one step of a small MLP, one process", short, 0.9),
        _row("one step of an MLP of 0.2 million parameters under DDP, 2 ranks by torchrun", long, 0.98),
    ]


def _steps_s(system: System, sizes: dict[str, int], world_size: int) -> list[float]:
    half = sizes["num_steps"] // 2
    run = run_reader(system, **sizes, num_warm=half, kind=system.package)
    return [max(one["seconds"] for one in the("steps", run.marks, world_size)) / half]


def _row(what: str, figures: list, least: float) -> Row:
    ours, bare, *others = figures
    return Row(
        what,
        MICROSECONDS,
        ours,
        (bare, *others),
        target=f"≥ {least} of the bare loop's speed",
        is_met=ratio_at_least(MICROSECONDS, ours, bare, least),
    )
