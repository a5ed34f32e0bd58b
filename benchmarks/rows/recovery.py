"""From the SIGKILL of a worker in the middle of training to the next finished step, which starts from a checkpoint."""

from collections.abc import Callable

from benchmarks import systems
from benchmarks.figures import SECONDS, Figure, Row, judged
from benchmarks.marks import Mark, launches, the
from benchmarks.rounds import Effort, in_turns
from benchmarks.systems import PACELINE, PACELINE_ON_RAY, System

PEERS = (systems.TORCHRUN_RESTARTING, systems.RAY, systems.RAY_TUNED)
LIMIT_S, LIMIT_ON_RAY_S = 0.35, 0.5
WITH_A_SPARE = {"spare_workers": 1, "num_cpus": 3, "rest_s": 8}
"""The rest before each launch is for the spare, which starts in the background when one has been used."""


def measure(effort: Effort, say: Callable[[str], None]) -> list[Row]:
    local, on_ray, *peers = in_turns((PACELINE, PACELINE_ON_RAY, *PEERS), _recovery_s, effort, say)
    what = "SIGKILL of a worker to the next finished step"
    return [
        _row(what, local, peers, LIMIT_S),
        _row(f"{what}: on Ray, with one spare worker", on_ray, peers, LIMIT_ON_RAY_S),
    ]


def _row(what: str, ours: Figure, peers: list[Figure], limit_s: float) -> Row:
    is_met = judged(ours, lambda value: value <= limit_s)
    return Row(what, SECONDS, ours, tuple(peers), target=f"≤ {limit_s} s", is_met=is_met)


def _recovery_s(system: System) -> list[float]:
    num_launches = 4 if system in (PACELINE, PACELINE_ON_RAY) else 1
    sizes = WITH_A_SPARE if system is PACELINE_ON_RAY else {}
    run = systems.run_job(
        system, "train_through_a_kill", num_launches, timeout_s=180, num_steps=20, keep_group=True, **sizes
    )
    each = list(launches(run.marks)) or [run.marks]  # under torchrun, the script is the launch
    return [_from_kill_to_step_s(marks) for marks in each]


def _from_kill_to_step_s(marks: list[Mark]) -> float:
    (kill,) = the("kill", marks, 1)
    return max(one["at"] for one in the("recovered", marks, 2)) - kill["at"]
