"""A second, brand-new worker group in the same process, to its first finished DDP step."""

from collections.abc import Callable

from benchmarks import systems
from benchmarks.figures import SECONDS, Row, judged
from benchmarks.marks import launches, the
from benchmarks.rounds import Effort, in_turns
from benchmarks.systems import System

PEERS = (
    systems.ACCELERATE_DEBUG,
    systems.ACCELERATE_NOTEBOOK,
    systems.FABRIC_SPAWN,
    systems.FABRIC_FORK,
    systems.RAY_TUNED,
)
LIMIT_S = 0.25


def measure(effort: Effort, say: Callable[[str], None]) -> list[Row]:
    ours, *peers = in_turns((systems.PACELINE, *PEERS), _first_step_s, effort, say)
    return [
        Row(
            "a second, brand-new worker group in the same process, to its first DDP step",
            SECONDS,
            ours,
            tuple(peers),
            target=f"≤ {LIMIT_S} s",
            is_met=judged(ours, lambda value: value <= LIMIT_S),
        )
    ]


def _first_step_s(system: System) -> list[float]:
    """From the call that makes the group until the last rank has done its step. The first group does not count."""
    run = systems.run_job(system, "train", num_launches=2 if system.is_slow else 4, num_steps=1, reports=False)
    _, *later = launches(run.marks)
    return [max(one["at"] for one in the("first_step", marks, 2)) - marks[0]["at"] for marks in later]
