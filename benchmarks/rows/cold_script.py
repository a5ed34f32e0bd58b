"""A cold script: from the start of python to the end of a 100-step DDP run.

Ours reports each step; the peers report nothing.
"""

from collections.abc import Callable

from benchmarks import systems
from benchmarks.figures import SECONDS, Row, ratio_at_least
from benchmarks.rounds import Effort, in_turns
from benchmarks.systems import PACELINE, System

PEERS = (
    systems.TORCHRUN,
    systems.ACCELERATE_DEBUG,
    systems.ACCELERATE_NOTEBOOK,
    systems.FABRIC_SPAWN,
    systems.FABRIC_FORK,
    systems.RAY,
    systems.RAY_TUNED,
)


def measure(effort: Effort, say: Callable[[str], None]) -> list[Row]:
    ours, *peers = in_turns((PACELINE, *PEERS), _wall_s, effort, say)
    return [
        Row(
            "a cold script: start of python to the end of a 100-step DDP run that reports each step",
            SECONDS,
            ours,
            tuple(peers),
            target="not slower than torchrun without reports",
            is_met=ratio_at_least(SECONDS, ours, peers[0], 1.0),
        )
    ]


def _wall_s(system: System) -> list[float]:
    return [systems.run_job(system, "train", num_steps=100, reports=system is PACELINE).wall_s]
