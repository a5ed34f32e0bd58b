"""What the workers are asked to do. A job is the same code whoever started them; only the `Hooks` differ."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from benchmarks.marks import mark
from benchmarks.workload import Training

Spec = dict[str, Any]
"""The name of the job, its sizes, and how often to launch it; see `systems.run_job`."""


@dataclass(frozen=True)
class Hooks:
    """What a system offers to the function that it runs. By default: nothing."""

    report: Callable[[dict[str, Any]], None] = lambda metrics: None
    save: Callable[[dict[str, Any]], None] | None = None
    """Returns when the state is durable."""
    load: Callable[[], dict[str, Any] | None] | None = None


def run_job(spec: Spec, hooks: Hooks) -> None:
    """Called on every rank, with the process group formed."""
    begin = time.perf_counter()
    JOBS[spec["job"]](spec, hooks)
    mark("function", seconds=time.perf_counter() - begin)


def train(spec: Spec, hooks: Hooks) -> None:
    """Rounds of steps after some that do not count; with a report at each step if the spec says so.

    With `is_empty` a step is nothing: the report is all there is.
    """
    training_step = (lambda: 0.5) if spec.get("is_empty") else Training().step
    report = hooks.report if spec["reports"] else Hooks.report
    for _ in range(spec.get("num_warmup_steps", 0)):
        training_step()
    for _ in range(spec.get("num_rounds", 1)):
        dist.barrier()
        begin = time.perf_counter()
        for step in range(spec["num_steps"]):
            loss = training_step()
            report({"loss": loss})
            if step == 0:
                mark("first_step")
        mark("loop", seconds=time.perf_counter() - begin)


def meet(spec: Spec, hooks: Hooks) -> None:
    """The least that a group can do together. Ranks that did not even meet would leave while others still join."""
    dist.barrier()


def time_reports(spec: Spec, hooks: Hooks) -> None:
    """The time that each report takes: between steps, which leave the caches to it as a training does, or not."""
    training = Training()
    hooks.report({"loss": training.step(), "step": -1})  # the first one may set things up
    seconds, loss = [], 0.5
    for step in range(spec["num_reports"]):
        if spec["between_steps"]:
            loss = training.step()
        begin = time.perf_counter()
        hooks.report({"loss": loss, "step": step})
        seconds.append(time.perf_counter() - begin)
    mark("reports", seconds=seconds)


def flood(spec: Spec, hooks: Hooks) -> None:
    """Reports and nothing else."""
    dist.barrier()
    mark("flood")
    for step in range(spec["num_reports"]):
        hooks.report({"loss": 0.5, "step": step})


def train_through_a_kill(spec: Spec, hooks: Hooks) -> None:
    """A few steps and a checkpoint, then rank 1 is killed; started again, one step from the checkpoint."""
    assert hooks.save is not None, "a system that cannot save cannot recover"
    assert hooks.load is not None, "a system that cannot resume cannot recover"
    state = hooks.load()
    training = Training()
    if state is not None:
        training.load(state)
        training.step()
        mark("recovered")
        return
    for _ in range(spec["num_steps"]):
        training.step()
    hooks.save(training.state())
    dist.barrier()
    if dist.get_rank() == 1:
        mark("kill")
        os.kill(os.getpid(), signal.SIGKILL)
    training.step()  # rank 0 waits here for rank 1, as in the middle of any training


JOBS = {job.__name__: job for job in (train, meet, time_reports, flood, train_through_a_kill)}
