"""How the gradients of all workers become one mean: the driver's side. Each is a class of its own, named in `registry`.

    simple      workers ─ gradients ─► driver: mean ─► workers                     the reference, two rounds
    ps          each worker is the server of one shard of the gradients, and makes the mean of that: three rounds
    allreduce   collectives of the workers' process group, during the backward pass where that is possible: one round

Rounds go through the driver, not through flags in shared memory: nobody is awake in vain for long, and a lost worker is
noticed at once.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np

from paceline.sgd.link import Link, LostError
from paceline.sgd.memory import SharedBuffers
from paceline.sgd.packing import Layout
from paceline.sgd.reduction import mean_into, union
from paceline.sgd.side import Contribution, Spec


@dataclass(slots=True)
class Made:
    """A step that all workers have made."""

    contributions: Sequence[Contribution]
    timings: dict[str, Any]


class Strategy(Protocol):
    name: ClassVar[str]
    has_group: ClassVar[bool]
    """Whether workers form a process group for it."""
    in_memory: ClassVar[bool]
    """Whether it uses memory that all processes share, if they are on one machine."""

    def __init__(self, spec: Spec, layout: Layout, buffers: SharedBuffers | None) -> None: ...

    def step(self, link: Link) -> Made: ...


class Simple:
    """See above. On several machines, gradients travel as messages."""

    name: ClassVar[str] = "simple"
    has_group: ClassVar[bool] = False
    in_memory: ClassVar[bool] = True

    def __init__(self, spec: Spec, layout: Layout, buffers: SharedBuffers | None):
        self._spec, self._layout, self._buffers = spec, layout, buffers

    def step(self, link: Link) -> Made:
        if link.num_workers == 1:
            return step_alone(link)
        times = [time.perf_counter()]
        parts = parts_of(link.ask("compute", self._buffers is None))
        times.append(time.perf_counter())
        with standing(parts):
            mean = self._mean(parts)
            times.append(time.perf_counter())
            applied = link.ask("apply", union([part.used for part in parts]), mean)
        return told(parts, applied, *times)

    def _mean(self, parts: Sequence[Contribution]) -> Any:
        """None if it is where workers find it."""
        buffers, segments = self._buffers, self._layout.segments
        if buffers is not None:
            sources = [buffers.of(rank) for rank in range(len(parts))]
            mean_into(buffers.mean, sources, segments, self._spec.divisor)
            return None
        mean = np.empty(self._layout.num_bytes, np.uint8)
        mean_into(mean, [part.gradients for part in parts], segments, self._spec.divisor)
        return mean


class ParameterServers:
    """See above. On several machines, each server gets its shards from the store that the cluster has for objects."""

    name: ClassVar[str] = "ps"
    has_group: ClassVar[bool] = False
    in_memory: ClassVar[bool] = True

    def __init__(self, spec: Spec, layout: Layout, buffers: SharedBuffers | None):
        self._is_shared = buffers is not None

    def step(self, link: Link) -> Made:
        if link.num_workers == 1:
            return step_alone(link)
        times = [time.perf_counter()]
        parts = parts_of(link.ask("compute" if self._is_shared else "compute_shards"))
        used = union([part.used for part in parts])
        times.append(time.perf_counter())
        with standing(parts):
            if self._is_shared:
                link.ask("reduce")
                times.append(time.perf_counter())
                applied = link.ask("apply", used)
            else:
                shards = zip(*(part.gradients for part in parts), strict=True)
                means = link.ask_each({server: ("reduce_shards", (shard,)) for server, shard in enumerate(shards)})
                times.append(time.perf_counter())
                applied = link.ask("apply_shards", used, means)
        return told(parts, applied, *times)


class AllReduce:
    """See above: workers do it among themselves."""

    name: ClassVar[str] = "allreduce"
    has_group: ClassVar[bool] = True
    in_memory: ClassVar[bool] = False

    def __init__(self, spec: Spec, layout: Layout, buffers: SharedBuffers | None):
        pass

    def step(self, link: Link) -> Made:
        if link.num_workers == 1:
            return step_alone(link)
        start = time.perf_counter()
        try:
            parts = parts_of(link.ask("step_in_group"))
        except LostError as lost:
            lost.contributions = parts_of(lost.values)
            raise
        whole = time.perf_counter() - start
        return Made(parts, _timings(parts, whole))


def parts_of(values: Sequence[Any]) -> list[Contribution]:
    """As they came: see `serving.Reply`."""
    return [Contribution._make(value) for value in values]


def _timings(parts: Sequence[Contribution], whole: float) -> dict[str, Any]:
    """Of a step that the workers make by themselves: as they tell it."""
    by_worker = [part.apply_s for part in parts]
    applied = max(by_worker, default=0.0)  # nobody may have lived to tell of it
    reduced = max([part.reduce_s for part in parts], default=0.0)
    return {
        "compute_grads_by_worker": [part.compute_s for part in parts],
        "compute_grads": max(0.0, whole - reduced - applied),
        "grad_reduce": reduced,
        "apply_grads_by_worker": by_worker,
        "apply_grads": applied,
        "step": whole,
    }


def step_alone(link: Link) -> Made:
    """Nobody to exchange anything with."""
    start = time.perf_counter()
    parts = parts_of(link.ask("step_alone"))
    timings = _timings(parts, time.perf_counter() - start)
    del timings["grad_reduce"]
    return Made(parts, timings)


def made_without(lost: LostError) -> Made:
    """A step that stands, though a worker was lost in it: of those that have told of it."""
    return Made(lost.contributions, _timings(lost.contributions, 0.0))


@contextmanager
def standing(parts: Sequence[Contribution]) -> Iterator[None]:
    """From here on, all is known that there is to tell of the step, whoever is lost."""
    try:
        yield
    except LostError as lost:
        lost.contributions = list(parts)
        raise


def told(
    parts: Sequence[Contribution], applied: Sequence[float], start: float, computed: float, reduced: float
) -> Made:
    end = time.perf_counter()
    timings = {
        "compute_grads_by_worker": [part.compute_s for part in parts],
        "compute_grads": computed - start,
        "grad_reduce": reduced - computed,
        "apply_grads_by_worker": list(applied),
        "apply_grads": end - reduced,
        "step": end - start,
    }
    return Made(parts, timings)
