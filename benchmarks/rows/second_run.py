"""A second run on a warm group: what it takes beyond the function itself.

The peers have no group that outlives a call, so theirs is the whole way: start workers, run, end them.
"""

from collections.abc import Callable

from benchmarks import systems
from benchmarks.figures import MILLISECONDS, Row, judged
from benchmarks.marks import Mark, launches, the
from benchmarks.rounds import Effort, in_turns
from benchmarks.systems import PACELINE, System

PEERS = (systems.ACCELERATE_DEBUG, systems.ACCELERATE_NOTEBOOK, systems.FABRIC_FORK, systems.RAY, systems.RAY_TUNED)
LIMIT_S = 0.03


def measure(effort: Effort, say: Callable[[str], None]) -> list[Row]:
    ours, *peers = in_turns((PACELINE, *PEERS), _overhead_s, effort, say)
    return [
        Row(
            "a second `run` on a warm group: overhead over the function itself",
            MILLISECONDS,
            ours,
            tuple(peers),
            target=f"≤ {LIMIT_S * 1e3:.0f} ms",
            is_met=judged(ours, lambda value: value <= LIMIT_S),
        )
    ]


def _overhead_s(system: System) -> list[float]:
    num_launches = 2 if system.is_slow else 6
    run = systems.run_job(system, "meet", num_launches=num_launches, keep_group=system is PACELINE)
    _, *later = launches(run.marks)
    return [duration_s(marks) - max(one["seconds"] for one in the("function", marks, 2)) for marks in later]


def duration_s(marks: list[Mark]) -> float:
    """Of a launch."""
    (end,) = the("end", marks, 1)
    return end["at"] - marks[0]["at"]
