"""An engine without processes: each worker plays a script of what it does, one event a poll.

engine = ScriptedEngine([[[*reports(3), dies("was killed")], [*reports(5), returns(None)]],     # first attempt
                         [[*reports(5), returns("a")],       [*reports(5), returns("b")]]])     # after the restart
Trainer(engine=engine, backend=BackendConfig(), num_workers=2).run(lambda: None)
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from paceline.checkpoints.content.files import MemoryFile, record_of
from paceline.checkpoints.content.snapshot import rank_dir, snapshot
from paceline.checkpoints.part import Part
from paceline.checkpoints.saver import Start
from paceline.checkpoints.storage.base import open_storage
from paceline.checkpoints.store import CheckpointStore
from paceline.session import Task
from paceline.workers.base import (
    Asked,
    Call,
    Died,
    Event,
    Place,
    Preempted,
    Preload,
    Raised,
    Resources,
    Returned,
    Sent,
    Size,
    WorkerInfo,
)


@dataclass(frozen=True)
class PartSaved:
    """A part of a checkpoint, which the group puts on storage before it is told."""

    part: Part
    files: Sequence[MemoryFile]


Line = Callable[[int], Event | PartSaved]
"""An event that does not know its rank yet."""

Scripts = Sequence[Sequence[Line]]
"""Of one attempt, by rank."""


def reports(num_reports: int, start: int = 1, **metrics: Any) -> Iterator[Line]:
    """Reports numbered from `start`, as `report(**metrics)` makes them."""
    for iteration in range(start, start + num_reports):
        stamped = {**metrics, "_timestamp": 0, "_time_this_iter_s": 0.0, "_training_iteration": iteration}
        yield partial(_sent, stamped)


def _sent(report: dict[str, Any], rank: int) -> Event:
    return Sent(rank, "report", dict(report))


def returns(value: Any = None) -> Line:
    return lambda rank: Returned(rank, (value, True))


def raises(error: BaseException) -> Line:
    return lambda rank: Raised(rank, type(error).__qualname__, str(error), f"scripted {error!r}\n", error)


def preempts(reason: str = "got SIGTERM") -> Line:
    return lambda rank: Preempted(rank, reason)


def saves(id: int, iteration: int, own: bool = False) -> Line:
    """The rank's part of the checkpoint `id`, saved after the report `iteration`: the shared state {"step": iteration}
    on rank 0, and, with `own`, the same as `per_rank` on every rank."""

    def line(rank: int) -> PartSaved:
        files = snapshot({"step": iteration}).files() if rank == 0 else []
        if own:
            files += snapshot({"per_rank": {"step": iteration, "rank": rank}}).files(rank_dir(rank))
        return PartSaved(Part(id, rank, iteration, 0.0, tuple(map(record_of, files))), files)

    return line


def asks(topic: str, value: Any = None) -> Line:
    return lambda rank: Asked(rank, 1, topic, value)


def dies(reason: str = "was killed by SIGKILL") -> Line:
    return lambda rank: Died(rank, reason)


class ScriptedEngine:
    """Plays one script for each rank in each attempt; `groups` are those it has made, for a look afterwards.

    An attempt may be a function of where it starts, which gives the scripts; then `size` says for how many ranks.
    """

    name = "scripted"

    def __init__(self, attempts: Iterable[Scripts | Callable[[Start], Scripts]], size: int | None = None):
        self._attempts, self._size = iter(attempts), size
        self.groups: list[ScriptedGroup] = []

    def warm(self, preload: Preload) -> None:
        pass

    def group(self, size: Size, resources: Resources, preload: Preload) -> "ScriptedGroup":
        self.groups.append(ScriptedGroup(self._attempts, self._size or size.min))
        return self.groups[-1]

    def describe(self) -> str:
        return "scripts"


class ScriptedGroup:
    """See `WorkerGroup` for the contract; it passes the same contract suite as the real ones where a script can."""

    def __init__(self, attempts: Iterator[Scripts | Callable[[Start], Scripts]], size: int):
        self._attempts, self._size = attempts, size
        self._next: Scripts | Callable[[Start], Scripts] = ()
        self._scripts: list[deque[Line]] = []
        self._store: CheckpointStore | None = None
        self.infos: Sequence[WorkerInfo] = ()
        self.calls: dict[int, Call] = {}
        self.answers: list[tuple[Asked, Any]] = []
        self.has_room = self.stop_requested = self._alive = False
        self.num_starts = self.num_aborts = 0

    def start(self) -> None:
        self._next = next(self._attempts)
        self._alive = True
        self.num_starts += 1
        size = self._size if callable(self._next) else len(self._next)
        self.infos = [WorkerInfo(Place(rank, rank, 0, size, size), 0, "script") for rank in range(size)]

    def submit(self, calls: Mapping[int, Call], logs: Mapping[int, Path] | None = None) -> None:
        self.calls.update(calls)
        scripts = self._next
        for task in (arg for arg in calls[0].args if isinstance(arg, Task)):
            self._store = CheckpointStore(task.start.root, open_storage(task.start.root), task.start.token)
            scripts = scripts(task.start) if callable(scripts) else scripts
        assert not callable(scripts), "scripts that depend on the start are for training functions"
        self._scripts = [deque(script) for script in scripts]

    def poll(self, timeout_s: float, deliver: Callable[[Event], None]) -> None:
        for rank, script in enumerate(self._scripts):
            if script:
                event = self._event(script.popleft()(rank))
                self._alive = self._alive and not isinstance(event, Died)
                deliver(event)

    def _event(self, event: Event | PartSaved) -> Event:
        if not isinstance(event, PartSaved):
            return event
        if event.files:
            assert self._store is not None, "a part is saved in a training function"
            self._store.put(event.part.id, event.files)
        return Sent(event.part.rank, "part", event.part)

    def answer(self, question: Asked, value: Any) -> None:
        self.answers.append((question, value))

    def can_grow(self) -> bool:
        return self.has_room

    def request_stop(self) -> None:
        self.stop_requested = True

    def stacks(self, timeout_s: float = 2.0) -> dict[int, str]:
        return {info.rank: "a scripted worker has no stack\n" for info in self.infos}

    def abort(self, deliver: Callable[[Event], None]) -> None:
        self._alive = False
        self.num_aborts += 1

    def healthy(self) -> bool:
        return self._alive

    def close(self, grace_s: float = 0.0) -> None:
        self._alive = False
