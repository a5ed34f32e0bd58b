"""The Ray engine: workers are actors on a Ray cluster, one actor a worker and nothing besides.

A group lives in one placement group. After a failure the actors that still live stay, since their process and its
imports are the expensive part: the call they are in is unwound, and only the dead and the stuck are replaced.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from paceline.errors import ArgumentError, StackDumpError, WorkerStartError
from paceline.workers import outcome
from paceline.workers.base import (
    Asked,
    Call,
    Died,
    Event,
    Place,
    Preempted,
    Preload,
    Printed,
    Resources,
    Sent,
    Size,
    WorkerInfo,
    rank_environ,
)
from paceline.workers.ray_slots import Slot, Slots, bundle_of, cluster_resources, draining_nodes, living_nodes
from paceline.workers.ray_worker import RayWorker
from paceline.workers.reports import unpack

_POLL_WAIT_S = 10.0
_UNWIND_S = 5.0
"""How long a survivor gets to end its call before it counts as stuck."""
_DRAIN_LOOK_S = 1.0
_GRANT_S = 1.0
"""How long the cluster gets, at the start, to grant an elastic group more than its minimum."""
_HIRE_S = 60.0
"""How long the processes of workers that have their resources may take to start, at least."""
_HIRE_TRIES = 3


class RayEngine:
    """Actors on a Ray cluster: the one this process is connected to, else the one RAY_ADDRESS names, else a new one
    on this machine.

    `placement` is "PACK" (few nodes) or "SPREAD" (many). `start_timeout_s` bounds the wait for resources that the
    cluster has but others are using, or that it had on a node which was lost; what it does not have at all when a group
    begins is an error at once. `spare_workers` keeps as many warm actors ready to take the place of dead ones.
    """

    name = "ray"

    def __init__(self, placement: str = "PACK", start_timeout_s: float = 60.0, spare_workers: int = 0):
        if placement not in ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"):
            raise ArgumentError(f"placement={placement!r}: expected PACK, SPREAD, STRICT_PACK or STRICT_SPREAD.")
        if start_timeout_s < 0 or spare_workers < 0:
            raise ArgumentError("start_timeout_s and spare_workers cannot be negative.")
        self.placement, self.start_timeout_s, self.spare_workers = placement, start_timeout_s, spare_workers

    def warm(self, preload: Preload) -> None:
        pass  # an actor takes resources: none is started before it is needed

    def group(self, size: Size, resources: Resources, preload: Preload) -> "RayGroup":
        return RayGroup(self, size, resources, preload)

    def describe(self) -> str:
        if not ray.is_initialized():
            return "not connected"
        total = cluster_resources()
        return f"{len(living_nodes())} nodes, {total.get('CPU', 0):g} CPUs, {total.get('GPU', 0):g} GPUs"


@dataclass
class _Actor:
    """One worker as its group knows it. `facts` are empty until it has arrived, `rank` is None for a spare, and one
    that is leaving has been told to, or stands on a node that has."""

    handle: Any
    slot: Slot
    greeting: Any
    num_tries: int = 1
    facts: dict[str, Any] = field(default_factory=dict)
    rank: int | None = None
    is_alive: bool = True
    is_leaving: bool = False
    is_busy: bool = False
    epoch: int = 0
    poll: Any = None

    def ask(self) -> None:
        """Keep one poll open."""
        if self.poll is None:
            self.poll = self.handle.poll.remote(self.epoch, _POLL_WAIT_S)


class RayGroup:
    """See `WorkerGroup` for the contract."""

    def __init__(self, engine: RayEngine, size: Size, resources: Resources, preload: Preload):
        self._engine, self._size, self._preload = engine, size, preload
        self._bundle = bundle_of(resources)
        self._slots = Slots(self._bundle, engine.placement)
        self._actors: list[_Actor] = []
        self._logs: dict[int, Path] = {}
        self._waiting: list[Event] = []
        self._is_whole = False
        self._next_look = 0.0
        self.infos: Sequence[WorkerInfo] = ()

    def start(self) -> None:
        """Fills up: actors that live stay, and whoever is missing is taken from the spares or made anew."""
        connect()
        try:
            self._reserve()
            self._hire()
            self._seat(self._await())
        except ray.exceptions.RayError as error:
            self.close()
            raise WorkerStartError(f"A worker {_why(error)} while the group was being made.") from error
        except BaseException:
            self.close()
            raise
        self._is_whole = True

    def submit(self, calls: Mapping[int, Call], logs: Mapping[int, Path] | None = None) -> None:
        packed = {id(call): ray.put(call.packed) for call in {id(call): call for call in calls.values()}.values()}
        self._logs.update(logs or {})
        for actor in self._seated():
            call = calls.get(_rank(actor))
            if call is not None:
                actor.is_busy = True
                actor.handle.begin.remote(packed[id(call)])

    def poll(self, timeout_s: float, deliver: Callable[[Event], None]) -> None:
        self._look_for_drains()
        self._collect(0.0 if self._waiting else timeout_s)
        while self._waiting:
            deliver(self._waiting.pop(0))

    def answer(self, question: Asked, value: Any) -> None:
        for actor in self._seated():
            if actor.rank == question.rank:
                actor.handle.answer.remote(question.number, value)

    def can_grow(self) -> bool:
        """Asks the cluster for more on the way: who is granted a slot gets ready while the others train."""
        if len(self.infos) >= self._size.max:
            return False
        if self._slots.grow(self._size.max + self._engine.spare_workers):
            for actor in self._hire():
                actor.handle.preload.remote(self._preload.to_train)
        self._greet(0.0)
        return self._size.clamp(len(self._arrived()) - self._engine.spare_workers) > len(self.infos)

    def request_stop(self) -> None:
        for actor in self._seated():
            actor.handle.stop.remote()

    def stacks(self, timeout_s: float = 2.0) -> dict[int, str]:
        if not self._actors:
            raise StackDumpError("There are no workers: stacks can be had between start() and shutdown().")
        asked = {actor.rank: actor.handle.stacks.remote() for actor in self._seated()}
        ready = set(ray.wait(list(asked.values()), num_returns=len(asked), timeout=timeout_s)[0])
        texts = {}
        for rank, ref in asked.items():
            with contextlib.suppress(ray.exceptions.RayError):
                texts[rank] = ray.get(ref) if ref in ready else "(no answer: the worker is stopped or stuck)\n"
        return {rank: texts.get(rank, "(no answer: the worker is gone)\n") for rank in asked if rank is not None}

    def healthy(self) -> bool:
        if not self._is_whole:
            return False
        self._collect(0.0)
        return all(actor.is_alive and not actor.is_busy for actor in self._seated())

    def abort(self, deliver: Callable[[Event], None]) -> None:
        """A worker that does not let go in time is killed."""
        self._is_whole = False
        alive = [actor for actor in self._seated() if actor.is_alive]
        asked = [actor.handle.unwind.remote(_UNWIND_S) for actor in alive]
        done = set(ray.wait(asked, num_returns=len(asked), timeout=_UNWIND_S + 1)[0]) if asked else set()
        for actor, ref in zip(alive, asked, strict=True):
            has_ended, rest = (_result_of(ref) if ref in done else None) or (False, [])
            self._take_rest(actor, rest)
            if not has_ended:
                self._dismiss(actor)
        while self._waiting:
            deliver(self._waiting.pop(0))
        self._actors = [actor for actor in self._actors if actor.is_alive]

    def _take_rest(self, actor: _Actor, rest: list[tuple[str, Any]]) -> None:
        """What a call had sent when it was unwound: first what the open poll has taken."""
        if actor.poll is not None and ray.wait([actor.poll], timeout=1.0)[0]:
            rest = [*(_result_of(actor.poll) or []), *rest]
        self._waiting.extend(self._event(actor, kind, value) for kind, value in rest)

    def close(self, grace_s: float = 0.0) -> None:
        for actor in self._actors:
            self._dismiss(actor)
        self._slots.release()
        self._actors, self.infos, self._is_whole = [], (), False
        self._waiting.clear()

    def _seated(self) -> list[_Actor]:
        return [actor for actor in self._actors if actor.rank is not None]

    def _arrived(self) -> list[_Actor]:
        return [actor for actor in self._actors if actor.is_alive and actor.facts]

    def _reserve(self) -> None:
        """A slot for everybody: at first as many as there are, later at least as many as there must be."""
        spares = self._engine.spare_workers
        if not len(self._slots):
            self._slots.reserve(self._size.min + spares, self._engine.start_timeout_s)
            self._slots.grow(self._size.max + spares, _GRANT_S)
            return
        nodes = draining_nodes()
        for actor in self._actors:
            if actor.is_leaving:
                self._dismiss(actor)
                if actor.facts["node_id"] in nodes:
                    self._slots.give_up(actor.slot)
        self._slots.ask_for(self._size.min + spares)
        needed = self._size.min + (spares if self._size.min == self._size.max else 0)
        self._slots.wait_for(needed, [actor.slot for actor in self._arrived()], self._engine.start_timeout_s)

    def _hire(self) -> list[_Actor]:
        """An actor for each slot that has none; returns the new ones."""
        self._actors = [actor for actor in self._actors if actor.is_alive]
        taken = {id(actor.slot) for actor in self._actors}
        hired = [self._make(slot) for slot in self._slots if id(slot) not in taken]
        self._actors += hired
        return hired

    def _await(self) -> int:
        """Wait until enough actors have arrived, and say how many shall have a rank; the rest are the spares.

        After a loss that is as many as before. An elastic group is content with fewer when they do not come in time.
        """
        begin, start_s = time.monotonic(), self._engine.start_timeout_s
        former, spares = len(self.infos), self._engine.spare_workers
        goal = self._size.clamp(max(former, len(self._arrived()) - spares) if former else len(self._slots) - spares)
        patience_s = self._size.replacement_timeout_s if former and self._size.min < self._size.max else start_s
        while (num_arrived := len(self._arrived())) < goal:
            limit_s = patience_s if num_arrived >= self._size.min else max(start_s, patience_s, _HIRE_S)
            left_s = begin + limit_s - time.monotonic()
            if left_s <= 0 and num_arrived >= self._size.min:
                return num_arrived
            if left_s <= 0:
                raise WorkerStartError(
                    f"{self._size.min - num_arrived} of {self._size.min} workers have their resources but did not "
                    f"start within {limit_s:g} s. Their nodes may be gone, or importing the framework takes longer: "
                    "raise start_timeout_s."
                )
            self._greet(left_s)
        return goal

    def _greet(self, timeout_s: float) -> None:
        """Wait for the next actor to arrive. One that was lost before it could tell where it is, for instance because
        its node was lost and Ray had not noticed yet, is made again."""
        expected = {actor.greeting: actor for actor in self._actors if actor.is_alive and not actor.facts}
        if not expected:
            return
        ready, _ = ray.wait(list(expected), num_returns=1, timeout=timeout_s)
        for actor in (expected[ref] for ref in ready):
            try:
                actor.facts = ray.get(actor.greeting)
            except ray.exceptions.RayError as error:
                self._dismiss(actor)
                was_lost = isinstance(error, ray.exceptions.RayActorError) and not error.actor_init_failed
                if was_lost and actor.num_tries < _HIRE_TRIES:
                    self._actors[self._actors.index(actor)] = self._make(actor.slot, actor.num_tries + 1)
                elif timeout_s > 0:
                    raise WorkerStartError(f"A worker could not be started: {error}") from error

    def _make(self, slot: Slot, num_tries: int = 1) -> _Actor:
        strategy = PlacementGroupSchedulingStrategy(slot.placement, placement_group_bundle_index=slot.bundle)
        custom = {name: amount for name, amount in self._bundle.items() if name not in ("CPU", "GPU")}
        recipe = ray.remote(RayWorker).options(
            num_cpus=self._bundle.get("CPU", 0),
            num_gpus=self._bundle.get("GPU", 0),
            resources=custom or None,
            scheduling_strategy=strategy,
            max_concurrency=8,
        )
        handle: Any = recipe.remote(self._preload.to_join)
        return _Actor(handle, slot, handle.hello.remote(), num_tries)

    def _seat(self, num_workers: int) -> None:
        """Give out the ranks, node by node, and tell every worker its place."""
        order = {id(slot): index for index, slot in enumerate(self._slots)}
        known = sorted(self._arrived(), key=lambda actor: (actor.rank is None, order[id(actor.slot)]))
        chosen = known[:num_workers]
        for actor in self._actors:
            actor.rank = None
        seating = places([(actor.facts["node_id"], actor.facts["gpu_ids"]) for actor in chosen])
        asked = []
        for actor, (place, visible_gpus) in zip(chosen, seating, strict=True):
            actor.rank, actor.is_busy, actor.poll = place.world_rank, False, None
            actor.epoch += 1
            environ = self._environ(place, visible_gpus)
            asked.append(actor.handle.settle.remote(actor.epoch, place, environ, sys.path, os.getcwd()))
        ray.get(asked)
        chosen.sort(key=lambda actor: actor.rank or 0)
        self._actors = [*chosen, *(actor for actor in self._actors if actor.rank is None)]
        by_rank = {place.world_rank: place for place, _ in seating}
        for actor in self._actors:
            if actor.rank is None:  # a spare, or one for later: it has time to get ready for training
                actor.handle.preload.remote(self._preload.to_train)
        self.infos = [
            WorkerInfo(by_rank[rank], actor.facts["pid"], actor.facts["host"], actor.facts["gpu_ids"])
            for rank, actor in enumerate(chosen)
        ]

    def _environ(self, place: Place, visible_gpus: Sequence[str]) -> dict[str, str]:
        threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, int(self._bundle.get("CPU", 1))))
        environ = {**rank_environ(place), "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        if visible_gpus:
            environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible_gpus)
        return environ

    def _collect(self, timeout_s: float) -> None:
        """Turn what has arrived into events, waiting for the first of it."""
        actors = [actor for actor in self._seated() if actor.is_alive]
        for actor in actors:
            actor.ask()
        polls = {actor.poll: actor for actor in actors}
        if not polls:
            return
        ready, _ = ray.wait(list(polls), num_returns=1, timeout=timeout_s)
        if ready:
            ready, _ = ray.wait(list(polls), num_returns=len(polls), timeout=0)
        for ref in ready:
            actor = polls[ref]
            actor.poll = None
            try:
                messages = ray.get(ref)
            except ray.exceptions.RayError as error:
                self._dismiss(actor)  # one that is only out of reach would keep its resources
                self._waiting.append(Died(_rank(actor), _why(error)))
                continue
            actor.ask()
            self._waiting.extend(self._event(actor, kind, value) for kind, value in messages)

    def _look_for_drains(self) -> None:
        """Once in a while, ask which nodes are about to be taken away; who stands there is told once."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _DRAIN_LOOK_S
        nodes = draining_nodes()
        for actor in self._arrived() if nodes else ():
            if actor.facts["node_id"] in nodes and not actor.is_leaving:
                actor.is_leaving = True
                if actor.rank is not None:
                    self._waiting.append(Preempted(actor.rank, "stands on a node that is being drained"))

    def _event(self, actor: _Actor, kind: str, value: Any) -> Event:
        rank = _rank(actor)
        if kind == "report":
            return Sent(rank, kind, unpack(value))
        if kind == "printed":
            return self._log(rank, value)
        if kind == "returned":
            actor.is_busy = False
            return outcome.returned(rank, value)
        if kind == "raised":
            actor.is_busy = False
            return outcome.raised(rank, value)
        if kind == "asked":
            return Asked(rank, *value)
        if kind == "preempted":
            actor.is_leaving = True
            return Preempted(rank, value)
        if kind == "exiting":
            actor.is_alive = False
            return Died(rank, value)
        return Sent(rank, kind, value)

    def _log(self, rank: int, text: str) -> Printed:
        if rank in self._logs:
            with contextlib.suppress(OSError), self._logs[rank].open("a") as file:
                file.write(text)
        return Printed(rank, text)

    def _dismiss(self, actor: _Actor) -> None:
        actor.is_alive = False
        if ray.is_initialized():
            with contextlib.suppress(Exception):
                ray.kill(actor.handle)


def connect() -> None:
    """Connect this process to a cluster unless it is: to that of RAY_ADDRESS, else to a new one on this machine."""
    if not ray.is_initialized():
        ray.init(log_to_driver=False)


def places(workers: Sequence[tuple[str, Sequence[str]]]) -> list[tuple[Place, tuple[str, ...]]]:
    """The place of each worker, given its node and its GPUs, and the GPUs that it shall see: all that the workers of
    its node have. Ranks run through one node after the other, in the order in which the nodes appear. Pure."""
    nodes: dict[str, list[int]] = {}
    for index, (node, _) in enumerate(workers):
        nodes.setdefault(node, []).append(index)
    seats: dict[int, tuple[Place, tuple[str, ...]]] = {}
    for node_rank, members in enumerate(nodes.values()):
        visible = tuple(sorted({gpu for index in members for gpu in workers[index][1]}))
        for local_rank, index in enumerate(members):
            gpus = workers[index][1]
            device = visible.index(gpus[0]) if gpus else None
            place = Place(len(seats), local_rank, node_rank, len(workers), len(members), device)
            seats[index] = (place, visible)
    return [seats[index] for index in range(len(workers))]


def _rank(actor: _Actor) -> int:
    assert actor.rank is not None
    return actor.rank


def _result_of(ref: Any) -> Any:
    """None when the actor is gone."""
    try:
        return ray.get(ref)
    except ray.exceptions.RayError:
        return None


def _why(error: Exception) -> str:
    """Ray's long story in one line."""
    text = str(error)
    if "node has died" in text:
        return "was lost with its node"
    detail = text.partition("Worker exit detail:")[2] or text.partition("The actor is dead because")[2] or text
    first = detail.strip().split(". ")[0].splitlines()[0]
    return f"was lost ({first.strip()})"
