"""A 100-step loop with a report at each step, against the bare loop under torchrun.

Timed in the workers, after steps that do not count.
"""

import statistics
from collections.abc import Callable
from typing import Any

from benchmarks import systems
from benchmarks.figures import MILLISECONDS, Row, ratio_at_least
from benchmarks.marks import the
from benchmarks.rounds import Effort, in_turns
from benchmarks.systems import PACELINE, TORCHRUN, System

LEAST_RATIO = 0.97
NUM_ROUNDS = 6


def measure(effort: Effort, say: Callable[[str], None]) -> list[Row]:
    ours, bare = in_turns((PACELINE, TORCHRUN), loop_s, effort, say)
    return [
        Row(
            "100 DDP steps with a report at each, against the bare torchrun loop",
            MILLISECONDS,
            ours,
            (bare,),
            target=f"≥ {LEAST_RATIO} of its speed",
            is_met=ratio_at_least(MILLISECONDS, ours, bare, LEAST_RATIO),
        )
    ]


def loop_s(system: System, num_rounds: int = NUM_ROUNDS, **sizes: Any) -> list[float]:
    """The median over several loops of one process: they differ less among each other than processes do."""
    sizes = {"num_warmup_steps": 50, "num_steps": 100, "num_rounds": num_rounds, **sizes}
    run = systems.run_job(system, "train", reports=system is not TORCHRUN, **sizes)
    return [statistics.median(one["seconds"] for one in the("loop", run.marks, 2 * num_rounds))]
