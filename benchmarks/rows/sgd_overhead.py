"""What DistributedSGD adds to a step: an empty one, here and on Ray, and the one after a worker was killed."""

from collections.abc import Callable

from benchmarks.figures import MILLISECONDS, SECONDS, Figure, Row, judged
from benchmarks.rounds import Effort, in_turns
from benchmarks.rows.sgd import ALLREDUCE, MODELS, ours, steps_s
from benchmarks.systems import System

EMPTY_S, EMPTY_ON_RAY_S, RECOVERY_S = 0.0003, 0.002, 0.35
MANY = {"num_warm": 100, "num_steps": 500, "num_rounds": 5}

KILL = System("Paceline", "torch", "sgd_steps.py", ("kill",))


def measure(effort: Effort, say: Callable[[str], None]) -> list[Row]:
    here, on_ray = in_turns(
        (ALLREDUCE, ours("allreduce", "ray")), lambda system: steps_s(system, "empty", effort, MANY), effort, say
    )
    (killed,) = in_turns((KILL,), lambda system: steps_s(system, "resnet", effort, MODELS["resnet"][1]), effort, say)
    return [
        _limited("an empty step of DistributedSGD, 2 workers", here, EMPTY_S, MILLISECONDS),
        _limited("an empty step of DistributedSGD, 2 workers on Ray", on_ray, EMPTY_ON_RAY_S, MILLISECONDS),
        _limited("DistributedSGD: SIGKILL of a worker to the next finished step", killed, RECOVERY_S, SECONDS),
    ]


def _limited(what: str, ours: Figure, limit_s: float, unit) -> Row:
    return Row(what, unit, ours, target=f"≤ {unit.show(limit_s)}", is_met=judged(ours, lambda value: value <= limit_s))
