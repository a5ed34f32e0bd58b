"""A step of DistributedSGD: against plain DDP, its strategies against each other, an empty one, and after a kill."""

import statistics
from collections.abc import Callable

from benchmarks.figures import MILLISECONDS, SECONDS, Figure, Row, judged, ratio_at_least
from benchmarks.marks import the
from benchmarks.rounds import Effort, in_turns
from benchmarks.systems import System, Torchrun, run_reader

LEAST_RATIO = 0.97
EMPTY_S, EMPTY_ON_RAY_S, RECOVERY_S = 0.0003, 0.002, 0.35
MODELS = {
    "resnet": ("a small ResNet-like model", {"num_warm": 10, "num_steps": 30, "num_rounds": 3}),
    "mlp": ("an MLP of 25 million parameters", {"num_warm": 3, "num_steps": 8, "num_rounds": 2}),
}
MANY = {"num_warm": 100, "num_steps": 500, "num_rounds": 5}

DDP = Torchrun("plain DDP, torchrun", "torch", "sgd_steps.py", ())
ACTORS = System("plain Ray actors", "ray", "sgd_steps.py", ("actors",))
KILL = System("Paceline", "torch", "sgd_steps.py", ("kill",))


def ours(strategy: str, engine: str = "local") -> System:
    name = f"Paceline, {strategy}" + (" on Ray" if engine == "ray" else "")
    return System(name, "ray" if engine == "ray" else "torch", "sgd_steps.py", (strategy, engine))


ALLREDUCE, PS, SIMPLE = ours("allreduce"), ours("ps"), ours("simple")


def measure(effort: Effort, say: Callable[[str], None]) -> list[Row]:
    rows = [row for name in MODELS for row in _of_model(name, effort, say)]
    here, on_ray = in_turns(
        (ALLREDUCE, ours("allreduce", "ray")), lambda system: _steps_s(system, "empty", effort, MANY), effort, say
    )
    (killed,) = in_turns((KILL,), lambda system: _steps_s(system, "resnet", effort, MODELS["resnet"][1]), effort, say)
    return [
        *rows,
        _limited("an empty step of DistributedSGD, 2 workers", here, EMPTY_S, MILLISECONDS),
        _limited("an empty step of DistributedSGD, 2 workers on Ray", on_ray, EMPTY_ON_RAY_S, MILLISECONDS),
        _limited("DistributedSGD: SIGKILL of a worker to the next finished step", killed, RECOVERY_S, SECONDS),
    ]


def _of_model(name: str, effort: Effort, say: Callable[[str], None]) -> list[Row]:
    what, sizes = MODELS[name]
    systems = (ALLREDUCE, DDP, PS, SIMPLE, ACTORS)
    allreduce, ddp, ps, simple, actors = in_turns(
        systems, lambda system: _steps_s(system, name, effort, sizes), effort, say
    )
    return [
        Row(
            f"one step of {what}, 2 workers, by allreduce",
            MILLISECONDS,
            allreduce,
            (ddp, simple),
            target=f"≥ {LEAST_RATIO} of plain DDP's speed",
            is_met=ratio_at_least(MILLISECONDS, allreduce, ddp, LEAST_RATIO),
        ),
        Row(f"one step of {what}, 2 workers, by sharded servers", MILLISECONDS, ps, (simple,)),
        Row(f"one step of {what}, 2 workers, gathered by the driver", MILLISECONDS, simple, (actors,)),
    ]


def _steps_s(system: System, model: str, effort: Effort, sizes: dict[str, int]) -> list[float]:
    if effort.is_quick:
        sizes = {"num_warm": 2, "num_steps": 3, "num_rounds": 1}
    spec = {"model": model, "kind": "ddp", **sizes}
    if system is ACTORS or system is KILL:
        spec["kind"] = system.arguments[0]
    elif system is not DDP:
        spec |= {"kind": "ours", "strategy": system.arguments[0], "engine": system.arguments[1]}
    run = run_reader(system, **spec)
    return [statistics.median(one["seconds"] for one in the("steps", run.marks, sizes["num_rounds"]))]


def _limited(what: str, ours: Figure, limit_s: float, unit) -> Row:
    return Row(what, unit, ours, target=f"≤ {unit.show(limit_s)}", is_met=judged(ours, lambda value: value <= limit_s))
