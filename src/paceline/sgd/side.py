"""A worker's side: its replicas, and what the strategies ask of them.

Gradients of the replicas of one worker are summed here, in the order of the devices, into one buffer. Where that is,
the strategy decides: memory that all processes of a machine share, or this worker's own.
"""

import inspect
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np

from paceline import registry
from paceline.errors import ArgumentError
from paceline.session import current, end_fork
from paceline.sgd.memory import SharedBuffers
from paceline.sgd.packing import Array, Gradients, Layout, Segment
from paceline.sgd.reduction import Used, gradients_in, mean_into, sum_into, used_of
from paceline.sgd.replica import Computed, Replica, replica_of
from paceline.workers import parcel
from paceline.workers.base import Place
from paceline.workers.proc_files import Address

R = TypeVar("R")


@dataclass(frozen=True)
class Spec:
    """What every worker has to know."""

    model_creator: Callable[..., Any]
    devices_per_worker: int
    strategy: str
    divisor: float
    """By which the sum of all gradients becomes their mean."""
    bucket_bytes: int
    shelf: str = "message"
    """Where what workers exchange is put, if they share no memory."""
    first_step: int = 0
    use_gpu: bool = False


class Contribution(NamedTuple):
    """One worker's part of a step. It travels as a plain tuple: see `serving.Reply`."""

    losses: list[float]
    metrics: list[dict[str, Any]]
    compute_s: float
    used: Used = None
    gradients: Any = None
    """If they do not go through shared memory: as the strategy hands them over."""
    position: Any = None
    """Where this worker is in its data, if that is known: see `Side.position`."""
    rank: int = 0
    reduce_s: float = 0.0
    apply_s: float = 0.0


class Side:
    """In a worker, as `wire.shared["sgd"]`. Its methods are what the driver asks for by name."""

    def __init__(self, spec: Spec, place: Place):
        self.spec, self.rank, self.num_workers = spec, place.world_rank, place.world_size
        self._owner_pid = os.getpid()
        self._first_device = place.device_index or 0
        self.step_number = spec.first_step
        self.replicas = [self._made(device) for device in range(spec.devices_per_worker)]
        self.layouts = [Layout(tuple(replica.slots)) for replica in self.replicas]
        self._shelf = registry.find("sgd_shelf", spec.shelf)()
        self._buffers: SharedBuffers | None = None
        self._own: Array | None = None
        self._group: Any = None

    def _made(self, device: int) -> Replica:
        given = (self.rank, device)[: num_parameters(self.spec.model_creator)]
        return self._on_device(device, lambda: replica_of(self.spec.model_creator(*given)))

    def _on_device(self, device: int, act: Callable[..., R], *args: Any) -> R:
        if not self.spec.use_gpu or "torch" not in sys.modules:  # other frameworks have ways of their own
            return act(*args)
        with registry.find("sgd_device", "torch")(self._first_device + device):
            return act(*args)

    def end_fork(self) -> None:
        """Where the user's code has returned, before anything that this worker shares with others: a process that was
        forked there has the same memory and the same connections. Nowhere else: a process id takes nearly a
        microsecond."""
        if os.getpid() != self._owner_pid:
            end_fork()

    @property
    def needs_engine(self) -> bool:
        """Whether what it returns has to travel through the engine: see `Shelf`."""
        return bool(self._shelf.needs_engine)

    @property
    def layout(self) -> Layout:
        return self.layouts[0]

    @property
    def own(self) -> Array:
        """The sum over this worker's replicas, as bytes."""
        if self._buffers is not None:
            return self._buffers.of(self.rank)
        if self._own is None:
            self._own = np.zeros(self.layout.num_bytes, np.uint8)
        return self._own

    def attach(self, address: Address, num_bytes: int) -> bool:
        """Have the gradients of all workers in memory that they share; says whether it can be had here."""
        self._buffers = SharedBuffers.open(address, self.num_workers, num_bytes)
        return self._buffers is not None

    def detach(self) -> None:
        """Another worker cannot see it: back to memory of its own."""
        self._buffers = None

    # --- a step, as strategies are made of it -------------------------------------------------------------------------

    def compute(self, is_sent: bool = False) -> Contribution:
        """Gradients of the next batch, summed over the replicas here."""
        start = time.perf_counter()
        computed = self.compute_all()
        used = self.sum_into(computed, self.layout.views(self.own))
        seconds = time.perf_counter() - start
        return self.told(computed, seconds, used=used, gradients=self.own if is_sent else None)

    def reduce(self) -> float:
        """As the server of one shard: the mean of it over all workers."""
        start = time.perf_counter()
        buffers = self._buffers
        assert buffers is not None, "reduce before attach"
        sources = [buffers.of(rank) for rank in range(self.num_workers)]
        shard = self.layout.shards(self.num_workers)[self.rank]
        mean_into(buffers.mean, sources, shard, self.spec.divisor)
        return time.perf_counter() - start

    def apply(self, used: Used, mean: Array | None = None) -> float:
        """The mean over all workers, from shared memory if it was not sent."""
        start = time.perf_counter()
        if mean is None:
            assert self._buffers is not None, "apply before attach"
            mean = self._buffers.mean
        self.apply_gradients(gradients_in(self.layout, mean, used))
        return time.perf_counter() - start

    def compute_shards(self) -> Contribution:
        """As `compute`, with the gradients cut for the servers and put where these find them."""
        part = self.compute()
        shards = self.layout.shards(self.num_workers)
        return part._replace(gradients=[self._shelf.put(_cut(self.own, shard)) for shard in shards])

    def reduce_shards(self, tokens: Sequence[Any]) -> Any:
        """As the server of one shard, of which these are the parts of all workers, in their order."""
        parts = [self._shelf.get(token) for token in tokens]
        means = []
        for pieces in zip(*parts, strict=True):
            segment = Segment(pieces[0].dtype.name, 0, pieces[0].size)
            mean = np.empty_like(pieces[0])
            mean_into(mean.view(np.uint8), [piece.view(np.uint8) for piece in pieces], [segment], self.spec.divisor)
            means.append(mean)
        return self._shelf.put(means)

    def apply_shards(self, used: Used, tokens: Sequence[Any]) -> float:
        """The means of all servers."""
        start = time.perf_counter()
        for shard, token in zip(self.layout.shards(self.num_workers), tokens, strict=True):
            for segment, mean in zip(shard, self._shelf.get(token), strict=True):
                self.own[segment.start : segment.stop].view(segment.dtype)[...] = mean
        self.apply_gradients(gradients_in(self.layout, self.own, used))
        return time.perf_counter() - start

    def warm_up(self) -> None:
        """What the first step would otherwise wait for. Collective, if there is a group."""
        if self.spec.strategy == "allreduce" and self.num_workers > 1:
            self.group.warm_up()  # has memory of its own for the gradients
        else:
            self.own[...] = 0  # its pages are there

    def step_alone(self) -> Contribution:
        """All of a step, on the only worker."""
        start = time.perf_counter()
        computed = self.compute_all()
        used = self.sum_into(computed, self.layout.views(self.own))
        mean_into(self.own, [self.own], self.layout.segments, self.spec.divisor)
        middle = time.perf_counter()
        self.apply_gradients(gradients_in(self.layout, self.own, used))
        return self.told(computed, middle - start, apply_s=time.perf_counter() - middle)

    def step_in_group(self) -> Contribution:
        """All of a step, with the mean by collectives of the workers' process group."""
        contribution: Contribution = self.group.step()
        return contribution

    @property
    def group(self) -> Any:
        if self._group is None:
            self._group = registry.find("sgd_exchange", "torch")(self)
        return self._group

    def compute_all(self) -> list[Computed]:
        computed = []
        for device, replica in enumerate(self.replicas):
            computed.append(self._on_device(device, replica.compute))
            self.end_fork()
        return computed

    def sum_into(self, computed: Sequence[Computed], views: Sequence[Array]) -> Used:
        gradients = [one.gradients for one in computed]
        sum_into(views, gradients)
        return used_of(gradients)

    def apply_gradients(self, gradients: Gradients) -> None:
        for device, replica in enumerate(self.replicas):
            self._on_device(device, replica.apply, gradients)
        self.step_number += 1

    def skip(self) -> Any:
        """Read the next batch as a step would, and leave it at that; where this worker is then."""
        self.compute_all()
        return self.position()

    def told(
        self,
        computed: Sequence[Computed],
        compute_s: float,
        used: Used = None,
        gradients: Any = None,
        reduce_s: float = 0.0,
        apply_s: float = 0.0,
    ) -> Contribution:
        losses, metrics = [one.loss for one in computed], [one.metrics for one in computed]
        position = self.position()
        return Contribution(losses, metrics, compute_s, used, gradients, position, self.rank, reduce_s, apply_s)

    def position(self) -> Any:
        """Where the replicas are in data of their own, and the worker in that of the run. None if nobody says."""
        replicas = [replica.position() for replica in self.replicas]
        session = current()
        data = session.keepers_state() if session is not None else {}
        return (replicas, data) if data or any(one is not None for one in replicas) else None

    # --- what is the same in all replicas -----------------------------------------------------------------------------

    def made(self) -> int:
        """How many steps these replicas have made."""
        return self.step_number

    def load(self, packed_state: bytes, step: int, positions: Sequence[Any] = ()) -> None:
        """What another replica had, and where all workers were in their data."""
        state = parcel.loads(packed_state)
        for replica in self.replicas:
            replica.load_state_dict(state)
        if any(positions):
            self._go_on(positions)
        self.step_number = step  # last: what raises before is no state to go on with

    def _go_on(self, positions: Sequence[Any]) -> None:
        """With another number of workers, what was a replica's own is nobody's now."""
        session = current()
        if session is not None:
            session.restore_keepers([None if one is None else one[1] for one in positions])
        if len(positions) == self.num_workers and (own := positions[self.rank]) is not None:
            for replica, position in zip(self.replicas, own[0], strict=False):
                replica.set_position(position)


def _cut(buffer: Array, segments: Sequence[Segment]) -> list[Array]:
    """Copies: the buffer is written to again before all have read them."""
    return [buffer[one.start : one.stop].view(one.dtype).copy() for one in segments]


def num_parameters(creator: Callable[..., Any]) -> int:
    """How many of (worker_idx, device_idx) it takes. ArgumentError for one that needs more."""
    try:
        parameters = inspect.signature(creator).parameters.values()
    except (TypeError, ValueError):  # a builtin that does not tell
        return 2
    if any(one.kind is one.VAR_POSITIONAL for one in parameters):
        return 2
    positional = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    unfilled = [one.name for one in positional[2:] if one.default is one.empty]
    unfilled += [one.name for one in parameters if one.kind is one.KEYWORD_ONLY and one.default is one.empty]
    if unfilled:
        raise ArgumentError(
            f"model_creator needs {', '.join(unfilled)} besides (worker_idx, device_idx): bind what else it takes with "
            "functools.partial."
        )
    return min(2, len(positional))
