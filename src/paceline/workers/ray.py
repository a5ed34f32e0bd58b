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
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from paceline.errors import ArgumentError, ResourcesError, StackDumpError, WorkerStartError
from paceline.workers import outcome
from paceline.workers.base import Call, Died, Event, Place, Printed, Resources, Sent, WorkerInfo, rank_environ
from paceline.workers.ray_worker import RayWorker
from paceline.workers.reports import unpack

_POLL_WAIT_S = 10.0
_UNWIND_S = 2.0
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

    def warm(self, preload: Sequence[str]) -> None:
        pass  # an actor takes resources: none is started before it is needed

    def group(self, num_workers: int, resources: Resources, preload: Sequence[str]) -> "RayGroup":
        return RayGroup(self, num_workers, resources, preload)

    def describe(self) -> str:
        if not ray.is_initialized():
            return "not connected"
        total = _cluster()
        return f"{len(_nodes())} nodes, {total.get('CPU', 0):g} CPUs, {total.get('GPU', 0):g} GPUs"


@dataclass
class _Actor:
    """One worker as its group knows it. `rank` is None for a spare."""

    handle: Any
    bundle: int
    greeting: Any
    num_tries: int
    facts: dict[str, Any] = field(default_factory=dict)
    rank: int | None = None
    is_alive: bool = True
    is_busy: bool = False
    epoch: int = 0
    poll: Any = None

    def ask(self) -> None:
        """Keep one poll open."""
        if self.poll is None:
            self.poll = self.handle.poll.remote(self.epoch, _POLL_WAIT_S)


class RayGroup:
    """See `WorkerGroup` for the contract."""

    def __init__(self, engine: RayEngine, num_workers: int, resources: Resources, preload: Sequence[str]):
        self._engine, self._num_workers, self._preload = engine, num_workers, tuple(preload)
        self._bundle = bundle_of(resources)
        self._placement: PlacementGroup | None = None
        self._actors: list[_Actor] = []
        self._logs: dict[int, Path] = {}
        self._waiting: list[Event] = []
        self._is_whole = False
        self.infos: Sequence[WorkerInfo] = ()

    def start(self) -> None:
        """Fills up: actors that live stay, and whoever is missing is taken from the spares or made anew."""
        connect()
        try:
            self._reserve()
            self._hire()
            self._seat()
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
        self._collect(0.0 if self._waiting else timeout_s)
        while self._waiting:
            deliver(self._waiting.pop(0))

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

    def abort(self) -> None:
        """End the running calls. A worker that does not let go in time is killed."""
        self._is_whole = False
        alive = [actor for actor in self._actors if actor.is_alive]
        asked = [actor.handle.unwind.remote(_UNWIND_S) for actor in alive]
        done = set(ray.wait(asked, num_returns=len(asked), timeout=_UNWIND_S + 1)[0]) if asked else set()
        for actor, ref in zip(alive, asked, strict=True):
            if not (ref in done and _answer_of(ref)):
                self._dismiss(actor)
        self._actors = [actor for actor in self._actors if actor.is_alive]
        self._waiting.clear()

    def close(self, grace_s: float = 0.0) -> None:
        for actor in self._actors:
            self._dismiss(actor)
        if self._placement is not None and ray.is_initialized():
            remove_placement_group(self._placement)
        self._actors, self._placement, self.infos, self._is_whole = [], None, (), False
        self._waiting.clear()

    def _seated(self) -> list[_Actor]:
        return [actor for actor in self._actors if actor.rank is not None]

    def _reserve(self) -> None:
        """Wait until every worker has its resources. Ray itself moves those that a lost node had to another one."""
        count = self._num_workers + self._engine.spare_workers
        if self._placement is None:
            check_feasible(count, self._bundle)
            self._placement = placement_group([self._bundle] * count, strategy=self._engine.placement)
        if not self._placement.wait(self._engine.start_timeout_s):
            raise ResourcesError(
                f"{count} workers with {_words(self._bundle)} each could not be placed within "
                f"{self._engine.start_timeout_s:g} s. The cluster has {_words(_cluster())}; free: "
                f"{_words(_free())}. Wait for others to finish, ask for less, or raise "
                "start_timeout_s."
            )

    def _hire(self) -> None:
        """Bring the number of living actors up to what was asked for, in the bundles that are free, and wait until
        there are enough of them; the rest will be the spares."""
        self._actors = [actor for actor in self._actors if actor.is_alive]
        taken = {actor.bundle for actor in self._actors}
        count = self._num_workers + self._engine.spare_workers
        self._actors += [self._make(bundle) for bundle in range(count) if bundle not in taken]
        allowed_s = max(self._engine.start_timeout_s, _HIRE_S)
        deadline = time.monotonic() + allowed_s
        expected = {actor.greeting: actor for actor in self._actors if not actor.facts}
        while (num_missing := self._num_workers - len(self._actors) + len(expected)) > 0:
            ready, _ = ray.wait(list(expected), num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise WorkerStartError(
                    f"{num_missing} of {self._num_workers} workers have their resources but did not start within "
                    f"{allowed_s:g} s. Their nodes may be gone, or importing the framework takes longer: raise "
                    "start_timeout_s."
                )
            actor = expected.pop(ready[0])
            if not self._welcome(actor):
                self._reserve()
                other = self._make(actor.bundle, actor.num_tries + 1)
                self._actors[self._actors.index(actor)] = expected[other.greeting] = other

    def _welcome(self, actor: _Actor) -> bool:
        """Learn where the worker is. False when it shall be made again: it was lost before it could tell, for instance
        because its node was lost and Ray had not noticed yet."""
        try:
            actor.facts = ray.get(actor.greeting)
        except ray.exceptions.RayError as error:
            was_lost = isinstance(error, ray.exceptions.RayActorError) and not error.actor_init_failed
            if was_lost and actor.num_tries < _HIRE_TRIES:
                return False
            raise WorkerStartError(f"A worker could not be started: {error}") from error
        return True

    def _make(self, bundle: int, num_tries: int = 1) -> _Actor:
        assert self._placement is not None
        strategy = PlacementGroupSchedulingStrategy(self._placement, placement_group_bundle_index=bundle)
        custom = {name: amount for name, amount in self._bundle.items() if name not in ("CPU", "GPU")}
        recipe = ray.remote(RayWorker).options(
            num_cpus=self._bundle.get("CPU", 0),
            num_gpus=self._bundle.get("GPU", 0),
            resources=custom or None,
            scheduling_strategy=strategy,
            max_concurrency=8,
        )
        handle: Any = recipe.remote(self._preload)
        return _Actor(handle, bundle, handle.hello.remote(), num_tries)

    def _seat(self) -> None:
        """Give out the ranks, node by node, and tell every worker its place."""
        known = [actor for actor in self._actors if actor.facts]
        known.sort(key=lambda actor: (actor.rank is None, actor.bundle))
        chosen = known[: self._num_workers]
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


def bundle_of(resources: Resources) -> dict[str, float]:
    """What one worker takes from the cluster: exactly what was asked for, and one CPU when nothing was said."""
    bundle = {"CPU": 1.0 if resources.cpus is None else float(resources.cpus), "GPU": float(resources.gpus)}
    return {name: amount for name, amount in {**bundle, **resources.custom}.items() if amount > 0}


def check_feasible(num_workers: int, bundle: Mapping[str, float]) -> None:
    """Raise at once when the cluster, even empty, could not hold the workers."""
    total = _cluster()
    missing = {
        name: num_workers * amount for name, amount in bundle.items() if num_workers * amount > total.get(name, 0)
    }
    nodes = [node["Resources"] for node in _nodes()]
    fits = any(all(node.get(name, 0) >= amount for name, amount in bundle.items()) for node in nodes)
    if missing or not fits:
        what = _words(missing) if missing else f"{_words(bundle)} on one node"
        raise ResourcesError(
            f"{num_workers} workers with {_words(bundle)} each need {what}; the whole cluster has "
            f"{_words({name: total.get(name, 0) for name in bundle})} on {len(nodes)} node(s). Ask for fewer workers "
            "or less for each, or add nodes."
        )


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


def _cluster() -> dict[str, float]:
    total: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return total


def _free() -> dict[str, float]:
    free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    return free


def _nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]


def _rank(actor: _Actor) -> int:
    assert actor.rank is not None
    return actor.rank


def _answer_of(ref: Any) -> bool:
    try:
        return bool(ray.get(ref))
    except ray.exceptions.RayError:
        return False


def _why(error: Exception) -> str:
    """Ray's long story in one line."""
    text = str(error)
    if "node has died" in text:
        return "was lost with its node"
    detail = text.partition("Worker exit detail:")[2] or text.partition("The actor is dead because")[2] or text
    first = detail.strip().split(". ")[0].splitlines()[0]
    return f"was lost ({first.strip()})"


def _words(resources: Mapping[str, float]) -> str:
    known = {
        name: amount
        for name, amount in resources.items()
        if not name.startswith(("node:", "bundle", "memory", "object")) and "_group_" not in name
    }
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(known.items()) if amount) or "nothing"
