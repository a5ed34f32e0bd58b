"""A step of DistributedSGD: against plain DDP, and its strategies against each other and plain Ray actors."""

import statistics
from collections.abc import Callable

from benchmarks.figures import MILLISECONDS, Row, ratio_at_least
from benchmarks.marks import the
from benchmarks.rounds import Effort, in_turns
from benchmarks.systems import System, Torchrun, run_reader

LEAST_RATIO = 0.97
MODELS = {
    "resnet": ("a small ResNet-like model", {"num_warm": 10, "num_steps": 30, "num_rounds": 3}),
    "mlp": ("an MLP of 25 million parameters", {"num_warm": 3, "num_steps": 8, "num_rounds": 2}),
}

DDP = Torchrun("plain DDP, torchrun", "torch", "sgd_steps.py", ())
ACTORS = System("plain Ray actors", "ray", "sgd_steps.py", ("actors",))


def ours(strategy: str, engine: str = "local") -> System:
    name = f"Paceline, {strategy}" + (" on Ray" if engine == "ray" else "")
    return System(name, "ray" if engine == "ray" else "torch", "sgd_steps.py", (strategy, engine))


ALLREDUCE, PS, SIMPLE = ours("allreduce"), ours("ps"), ours("simple")


def measure(effort: Effort, say: Callable[[str], None]) -> list[Row]:
    return [row for name in MODELS for row in _of_model(name, effort, say)]


def _of_model(name: str, effort: Effort, say: Callable[[str], None]) -> list[Row]:
    what, sizes = MODELS[name]
    systems = (ALLREDUCE, DDP, PS, SIMPLE, ACTORS)
    allreduce, ddp, ps, simple, actors = in_turns(
        systems, lambda system: steps_s(system, name, effort, sizes), effort, say
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


def steps_s(system: System, model: str, effort: Effort, sizes: dict[str, int]) -> list[float]:
    """What a step takes, as one sample: the median of several rounds of many steps."""
    if effort.is_quick:
        sizes = {"num_warm": 2, "num_steps": 3, "num_rounds": 1}
    spec = {"model": model, "kind": "ddp", **sizes}
    if len(system.arguments) == 1:
        spec["kind"] = system.arguments[0]
    elif system is not DDP:
        spec |= {"kind": "ours", "strategy": system.arguments[0], "engine": system.arguments[1]}
    run = run_reader(system, **spec)
    return [statistics.median(one["seconds"] for one in the("steps", run.marks, sizes["num_rounds"]))]
