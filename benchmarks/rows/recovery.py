"""From the SIGKILL of a worker in the middle of training to the next finished step, which starts from a checkpoint."""

from collections.abc import Callable

from benchmarks import systems
from benchmarks.figures import SECONDS, Row, judged
from benchmarks.marks import Mark, launches, the
from benchmarks.rounds import Effort, in_turns
from benchmarks.systems import PACELINE, System

PEERS = (systems.TORCHRUN_RESTARTING, systems.RAY, systems.RAY_TUNED)
LIMIT_S = 0.35


def measure(effort: Effort, say: Callable[[str], None]) -> list[Row]:
    ours, *peers = in_turns((PACELINE, *PEERS), _recovery_s, effort, say)
    return [
        Row(
            "SIGKILL of a worker to the next finished step",
            SECONDS,
            ours,
            tuple(peers),
            target=f"≤ {LIMIT_S} s",
            is_met=judged(ours, lambda value: value <= LIMIT_S),
        )
    ]


def _recovery_s(system: System) -> list[float]:
    num_launches = 4 if system is PACELINE else 1
    run = systems.run_job(
        system, "train_through_a_kill", num_launches=num_launches, num_steps=20, keep_group=True, timeout_s=120
    )
    each = list(launches(run.marks)) or [run.marks]  # under torchrun, the script is the launch
    return [_from_kill_to_step_s(marks) for marks in each]


def _from_kill_to_step_s(marks: list[Mark]) -> float:
    (kill,) = the("kill", marks, 1)
    return max(one["at"] for one in the("recovered", marks, 2)) - kill["at"]
