"""Who is in a group on Ray: actors are hired for its slots, arrive, get a rank or stay spare, and are let go."""

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from paceline import frameworks
from paceline.errors import WorkerStartError
from paceline.workers import surroundings
from paceline.workers.base import Place, Preload, Size, WorkerInfo, rank_environ
from paceline.workers.devices import gpu_variables
from paceline.workers.ray_process import ProcessWatch
from paceline.workers.ray_slots import Slot, Slots, draining_nodes
from paceline.workers.ray_worker import RayWorker

_POLL_WAIT_S = 10.0
_GRANT_S = 1.0
"""How long the cluster gets, at the start, to grant an elastic group more than its minimum."""
_HIRE_S = 60.0
"""How long the processes of workers that have their resources may take to start, at least."""
_HIRE_TRIES = 3


@dataclass
class Actor:
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
    waits_until: float = 0.0
    """It has a question, and has nothing else to say, most likely: the answer is the next poll, if it comes soon."""
    process: ProcessWatch | None = None
    """From its arrival on."""

    def ask(self) -> None:
        """Keep one poll open."""
        if self.poll is None:
            self.poll = self.handle.poll.remote(self.epoch, _POLL_WAIT_S)

    def answer(self, number: int, value: Any) -> None:
        """This is the next poll, too, if none is open."""
        if self.poll is None:
            self.poll = self.handle.answer_and_poll.remote(number, value, self.epoch, _POLL_WAIT_S)
        else:
            self.handle.answer.remote(number, value)

    def dismiss(self) -> None:
        self.is_alive = False
        if ray.is_initialized():
            with contextlib.suppress(Exception):
                ray.kill(self.handle)


class Roster:
    """The actors of one group. `infos` are those that have a rank."""

    def __init__(
        self,
        slots: Slots,
        size: Size,
        preload: Preload,
        num_spares: int,
        start_timeout_s: float,
        sees_all_gpus: bool = False,
    ):
        self._slots, self._size, self._preload, self._sees_all_gpus = slots, size, preload, sees_all_gpus
        self._num_spares, self._start_timeout_s = num_spares, start_timeout_s
        self._actors: list[Actor] = []
        self.infos: Sequence[WorkerInfo] = ()

    def fill(self) -> None:
        """Actors that live stay, and whoever is missing is taken from the spares or made anew."""
        self._reserve()
        self._hire()
        self._seat(self._await())

    def seated(self) -> list[Actor]:
        return [actor for actor in self._actors if actor.rank is not None]

    def arrived(self) -> list[Actor]:
        return [actor for actor in self._actors if actor.is_alive and actor.facts]

    def can_grow(self) -> bool:
        """Asks the cluster for more on the way: who is granted a slot gets ready while the others train."""
        if len(self.infos) >= self._size.max:
            return False
        if self._slots.grow(self._size.max + self._num_spares):
            for actor in self._hire():
                actor.handle.preload.remote(self._preload.to_train)
        self._greet(0.0)
        return self._size.clamp(len(self.arrived()) - self._num_spares) > len(self.infos)

    def clear(self) -> None:
        """Let everybody go, and their resources."""
        for actor in self._actors:
            actor.dismiss()
        self._slots.release()
        self._actors, self.infos = [], ()

    def _reserve(self) -> None:
        """A slot for everybody: at first as many as there are, later at least as many as there must be."""
        spares = self._num_spares
        if not len(self._slots):
            self._slots.reserve(self._size.min + spares, self._start_timeout_s)
            self._slots.grow(self._size.max + spares, _GRANT_S)
            return
        nodes = draining_nodes()
        for actor in self._actors:
            if actor.is_leaving:
                actor.dismiss()
                if actor.facts["node_id"] in nodes:
                    self._slots.give_up(actor.slot)
        self._slots.ask_for(self._size.min + spares)
        needed = self._size.min + (spares if self._size.min == self._size.max else 0)
        self._slots.wait_for(needed, [actor.slot for actor in self.arrived()], self._start_timeout_s)

    def _hire(self) -> list[Actor]:
        """An actor for each slot that has none; returns the new ones."""
        self._actors = [actor for actor in self._actors if actor.is_alive]
        taken = {id(actor.slot) for actor in self._actors}
        hired = [self._make(slot) for slot in self._slots if id(slot) not in taken]
        self._actors += hired
        return hired

    def _make(self, slot: Slot, num_tries: int = 1) -> Actor:
        strategy = PlacementGroupSchedulingStrategy(slot.placement, placement_group_bundle_index=slot.bundle)
        bundle = self._slots.bundle
        custom = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")}
        recipe = ray.remote(RayWorker).options(
            num_cpus=bundle.get("CPU", 0),
            num_gpus=bundle.get("GPU", 0),
            resources=custom or None,
            scheduling_strategy=strategy,
            max_concurrency=8,
        )
        handle: Any = recipe.remote(self._preload.to_join)
        return Actor(handle, slot, handle.hello.remote(), num_tries)

    def _await(self) -> int:
        """Wait until enough actors have arrived, and say how many shall have a rank; the rest are the spares.

        After a loss that is as many as before. An elastic group is content with fewer when they do not come in time.
        """
        begin, start_s = time.monotonic(), self._start_timeout_s
        former, spares = len(self.infos), self._num_spares
        goal = self._size.clamp(max(former, len(self.arrived()) - spares) if former else len(self._slots) - spares)
        patience_s = self._size.replacement_timeout_s if former and self._size.min < self._size.max else start_s
        while (num_arrived := len(self.arrived())) < goal:
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
                actor.process = ProcessWatch(actor.facts["birth"])
            except ray.exceptions.RayError as error:
                actor.dismiss()
                was_lost = isinstance(error, ray.exceptions.RayActorError) and not error.actor_init_failed
                if was_lost and actor.num_tries < _HIRE_TRIES:
                    self._actors[self._actors.index(actor)] = self._make(actor.slot, actor.num_tries + 1)
                elif timeout_s > 0:
                    raise WorkerStartError(f"A worker could not be started: {error}") from error

    def _seat(self, num_workers: int) -> None:
        """Give out the ranks, node by node, and tell every worker its place."""
        order = {id(slot): index for index, slot in enumerate(self._slots)}
        known = sorted(self.arrived(), key=lambda actor: (actor.rank is None, order[id(actor.slot)]))
        chosen = known[:num_workers]
        for actor in self._actors:
            actor.rank = None
        seating = places([(actor.facts["node_id"], actor.facts["gpu_ids"]) for actor in chosen])
        asked = []
        for actor, (place, visible_gpus) in zip(chosen, seating, strict=True):
            actor.rank, actor.is_busy, actor.poll = place.world_rank, False, None
            actor.epoch += 1
            environ = self._environ(place, visible_gpus)
            cwd = surroundings.cwd() or os.curdir
            asked.append(actor.handle.settle.remote(actor.epoch, place, environ, sys.path, cwd))
        self._expect(asked, chosen)
        chosen.sort(key=lambda actor: actor.rank or 0)
        self._actors = [*chosen, *(actor for actor in self._actors if actor.rank is None)]
        by_rank = {place.world_rank: place for place, _ in seating}
        for actor in self._actors:
            if actor.rank is None:  # a spare, or one for later: it has time to get ready for training
                actor.handle.preload.remote(self._preload.to_train)
        self.infos = [
            WorkerInfo(
                by_rank[rank], actor.facts["pid"], actor.facts["host"], actor.facts["gpu_ids"], actor.facts["node_id"]
            )
            for rank, actor in enumerate(chosen)
        ]

    def _expect(self, answers: list[Any], actors: Sequence[Actor]) -> None:
        """A worker whose node has just been lost may not answer for as long as Ray does not know it."""
        limit_s = max(self._start_timeout_s, _HIRE_S)
        ready = set(ray.wait(answers, num_returns=len(answers), timeout=limit_s)[0]) if answers else set()
        late = [actor for actor, answer in zip(actors, answers, strict=True) if answer not in ready]
        if late:
            raise WorkerStartError(
                f"{len(late)} of {len(answers)} workers did not take their place within {limit_s:g} s, among them "
                f"process {late[0].facts['pid']} on {late[0].facts['host']}."
            )
        ray.get(answers)

    def _environ(self, place: Place, visible_gpus: Sequence[str]) -> dict[str, str]:
        num_threads = max(1, int(self._slots.bundle.get("CPU", 1)))
        threads = frameworks.thread_variables(num_threads)
        environ = {**rank_environ(place), **{name: os.environ.get(name, threads[name]) for name in threads}}
        return environ | gpu_variables(visible_gpus, sees_all=self._sees_all_gpus)  # Ray hides none from who has none


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
