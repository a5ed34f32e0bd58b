"""The Ray engine: workers are actors on a Ray cluster, one actor a worker and nothing besides.

A group lives in one placement group. After a failure the actors that still live stay, since their process and its
imports are the expensive part: the call they are in is unwound, and only the dead and the stuck are replaced.
"""

import contextlib
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from paceline.errors import ArgumentError, StackDumpError, WorkerStartError
from paceline.workers import outcome
from paceline.workers.base import (
    DIRECT,
    Asked,
    Call,
    Died,
    Event,
    Preempted,
    Preload,
    Printed,
    Resources,
    Sent,
    Size,
    WorkerInfo,
)
from paceline.workers.framing import UnreadError
from paceline.workers.ray_connection import connect, connection
from paceline.workers.ray_direct import LINE, TELL_S, Lines
from paceline.workers.ray_roster import Actor, Roster
from paceline.workers.ray_slots import Slots, bundle_of, cluster_resources, draining_nodes, living_nodes
from paceline.workers.ray_worker import BATCH_S
from paceline.workers.reports import unpack

_UNWIND_S = 5.0
"""How long a survivor gets to end its call before it counts as stuck."""
_LOOK_S = 1.0
"""How often it is asked who is about to be taken away, and looked who has ended."""
_ANSWER_S = 0.05
"""Within which an answer is soon. Until then, nobody looks whether who has asked lives."""
_SOON_S = 0.01
"""Within which Ray is asked for news when not all workers have lines: one is about to have its own, or was lost."""
_LEFT = "was lost (this process has left its cluster, by ray.shutdown())"
_PORTION = 10_000
"""How much of a backlog is delivered before the driver gets to do something with it."""

_Arrived = Event | tuple[int, bytes]
"""What waits to be delivered. A report is still packed, beside its rank."""


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

    def connect(self) -> None:
        connect()

    def group(self, size: Size, resources: Resources, preload: Preload) -> "RayGroup":
        return RayGroup(self, size, resources, preload)

    def has_room_beside(self, resources: Resources) -> bool:
        """What a cluster gives to one, another has to do without."""
        return False

    def describe(self) -> str:
        if not ray.is_initialized():
            return "not connected"
        total = cluster_resources()
        return f"{len(living_nodes())} nodes, {total.get('CPU', 0):g} CPUs, {total.get('GPU', 0):g} GPUs"


class RayGroup:
    """What the actors of a roster say, as events. See `WorkerGroup` for the contract."""

    def __init__(self, engine: RayEngine, size: Size, resources: Resources, preload: Preload):
        slots = Slots(bundle_of(resources), engine.placement)
        self._roster = Roster(
            slots, size, preload, engine.spare_workers, engine.start_timeout_s, resources.sees_all_gpus
        )
        self._logs: dict[int, Path] = {}
        self._waiting: deque[_Arrived] = deque()
        self._lines = Lines()
        self._is_whole = False
        self._connection: tuple[str, ...] | None = None
        """By which the actors were made: of another one, Ray knows nothing of them."""
        self._next_look = self._next_collect = 0.0

    @property
    def infos(self) -> Sequence[WorkerInfo]:
        return self._roster.infos

    def start(self) -> None:
        """Fills up: actors that live stay, and whoever is missing is taken from the spares or made anew."""
        if not self._is_connected:  # those of a cluster that this process has left are of no use
            self._roster.clear()
        connect()
        self._connection = connection()
        try:
            self._roster.fill()
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
        for actor in self._roster.seated():
            call = calls.get(_rank(actor))
            if call is not None:
                actor.is_busy = True
                actor.handle.begin.remote(packed[id(call)])

    def poll(self, timeout_s: float, deliver: Callable[[Event], None]) -> None:
        self._look_around()
        if self._lines.num_settled and not self._waiting:
            self._converse(timeout_s)
        elif not self._waiting:
            self._collect(timeout_s)
        self._hand_over(deliver, at_most=_PORTION)

    def answer(self, question: Asked, value: Any) -> None:
        for actor in self._roster.seated():
            if actor.rank == question.rank and question.number == DIRECT:
                self._answer_directly(actor, value)
            elif actor.rank == question.rank and self._is_connected:  # else the next poll tells
                actor.answer(question.number, value)

    def _answer_directly(self, actor: Actor, value: Any) -> None:
        rank = _rank(actor)
        try:
            self._lines.answer(rank, value)
        except UnreadError:  # it is stopped, say, and would wait for the rest when it goes on
            actor.dismiss()
            self._waiting.append(Died(rank, f"did not read what it was told within {TELL_S:g} s, and was ended"))

    def can_grow(self) -> bool:
        return self._roster.can_grow()

    def request_stop(self) -> None:
        for actor in self._roster.seated() if self._is_connected else ():  # else the next poll tells
            actor.handle.stop.remote()

    def stacks(self, timeout_s: float = 2.0) -> dict[int, str]:
        if not self.infos:
            raise StackDumpError("There are no workers: stacks can be had between start() and shutdown().")
        if not self._is_connected:
            gone = "(no answer: this process has left the cluster of the worker)\n"
            return {_rank(actor): gone for actor in self._roster.seated()}
        asked = {actor.rank: actor.handle.stacks.remote() for actor in self._roster.seated()}
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
        return all(actor.is_alive and not actor.is_busy for actor in self._roster.seated())

    def abort(self, deliver: Callable[[Event], None]) -> None:
        """A worker that does not let go in time, or cannot leave its group, is killed."""
        self._is_whole = False
        self._lines.clear()
        alive = self._alive() if self._is_connected else []
        asked = [actor.handle.unwind.remote(_UNWIND_S) for actor in alive]
        done = set(ray.wait(asked, num_returns=len(asked), timeout=_UNWIND_S + 1)[0]) if asked else set()
        for actor, ref in zip(alive, asked, strict=True):
            may_stay, rest = (_result_of(ref) if ref in done else None) or (False, [])
            self._take_rest(actor, rest)
            if not may_stay:
                actor.dismiss()
        self._hand_over(deliver)

    def _take_rest(self, actor: Actor, rest: list[tuple[str, Any]]) -> None:
        """What a call had sent when it was unwound: first what the open poll has taken."""
        if actor.poll is not None and ray.wait([actor.poll], timeout=1.0)[0]:
            rest = [*(_result_of(actor.poll) or []), *rest]
        self._waiting.extend(self._event(actor, kind, value) for kind, value in rest)

    def _hand_over(self, deliver: Callable[[Event], None], at_most: float = math.inf) -> None:
        while self._waiting and at_most > 0:
            item = self._waiting.popleft()
            deliver(Sent(item[0], "report", unpack(item[1])) if isinstance(item, tuple) else item)
            at_most -= 1

    def close(self, grace_s: float = 0.0) -> None:
        self._lines.clear()
        self._roster.clear()
        self._is_whole = False
        self._waiting.clear()

    def _collect(self, timeout_s: float) -> None:
        """Take what has arrived, waiting for the first of it. By turns from each worker: of a backlog, what belongs to
        one step then comes together, and need not be kept until the last worker's turn."""
        if not self._is_connected:  # whatever is asked of Ray now would start another cluster, or be unknown to it
            self._waiting.extend(event for actor in self._alive() for event in self._lose(actor, _LEFT))
            return
        polls = self._open_polls()
        if not polls:
            return
        ready, rest = ray.wait(list(polls), num_returns=1, timeout=timeout_s)
        if ready and rest:
            ready += ray.wait(rest, num_returns=len(rest), timeout=0)[0]
        batches: list[list[_Arrived]] = []
        for ref in ready:
            actor = polls[ref]
            actor.poll = None
            try:
                messages = ray.get(ref)
            except ray.exceptions.RayError as error:
                batches.append([*self._lose(actor, _why(error))])
                continue
            if any(kind == "asked" for kind, _ in messages):
                actor.waits_until = time.monotonic() + _ANSWER_S
            else:
                actor.ask()
            batches.append(self._events(actor, messages))
        for turn in itertools.zip_longest(*batches):
            self._waiting.extend(item for item in turn if item is not None)

    def _converse(self, timeout_s: float) -> None:
        """Take what is asked directly. Whatever else there is comes through Ray, which is asked for it once in a
        while."""
        longest_s = BATCH_S if self._lines.num_settled == len(self.infos) else _SOON_S
        found = self._lines.questions(min(timeout_s, longest_s))
        self._waiting.extend(found)
        if not found or time.monotonic() >= self._next_collect:
            self._collect(0.0)
            self._next_collect = time.monotonic() + BATCH_S

    def _give_line(self, actor: Actor, number: int) -> None:
        """If all workers are here: else a step takes as long as those elsewhere; and if files can be opened."""
        here, address = ray.get_runtime_context().get_node_id(), None
        if all(other.facts["node_id"] == here for other in self._roster.seated()):
            with contextlib.suppress(OSError):
                address = self._lines.make(_rank(actor))
        actor.answer(number, address)

    def _open_polls(self) -> dict[Any, Actor]:
        """Of all actors, but for those that are soon to be answered; of these too, if there are no others to wait
        for."""
        actors, now = self._alive(), time.monotonic()
        others = [actor for actor in actors if actor.poll is not None or now >= actor.waits_until]
        for actor in others or actors:
            actor.ask()
        return {actor.poll: actor for actor in others or actors}

    def _look_around(self) -> None:
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + _LOOK_S
            self._look_for_drains()
            self._look_for_ends()

    def _look_for_drains(self) -> None:
        """Ask which nodes are about to be taken away; who stands there is told once."""
        nodes = draining_nodes()
        for actor in self._roster.arrived() if nodes else ():
            if actor.facts["node_id"] in nodes and not actor.is_leaving:
                actor.is_leaving = True
                if actor.rank is not None:
                    self._waiting.append(Preempted(actor.rank, "stands on a node that is being drained"))

    def _look_for_ends(self) -> None:
        """Of workers on this machine that have ended without Ray's knowing."""
        for actor in self._alive():
            if actor.process is not None and actor.process.look():
                self._waiting.extend(self._lose(actor, "was lost (its process has ended)"))

    def _lose(self, actor: Actor, reason: str) -> list[Event]:
        """What it has said on its line, and then that it is gone. One that is only out of reach would keep its
        resources."""
        actor.dismiss()
        return [*self._lines.last_questions(_rank(actor)), Died(_rank(actor), reason)]

    @property
    def _is_connected(self) -> bool:
        """Whether this process is, still, to the cluster of these actors."""
        now = connection()
        return now is not None and now == self._connection

    def _alive(self) -> list[Actor]:
        return [actor for actor in self._roster.seated() if actor.is_alive]

    def _events(self, actor: Actor, messages: list[tuple[str, Any]]) -> list[_Arrived]:
        events = []
        for kind, value in messages:
            if kind == "asked" and value[1] == LINE:
                self._give_line(actor, value[0])
            elif kind == LINE:
                self._lines.settle(_rank(actor), is_open=value)
            else:
                events.append(self._event(actor, kind, value))
        return events

    def _event(self, actor: Actor, kind: str, value: Any) -> _Arrived:
        rank = _rank(actor)
        if kind == "report":
            return rank, value
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
        return Sent(rank, kind, value)

    def _log(self, rank: int, text: str) -> Printed:
        if rank in self._logs:
            with contextlib.suppress(OSError), self._logs[rank].open("a", encoding="utf-8") as file:
                file.write(text)
        return Printed(rank, text)


def _rank(actor: Actor) -> int:
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
