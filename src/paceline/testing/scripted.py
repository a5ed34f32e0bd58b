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
from paceline.errors import StackDumpError, WorkerStartError
from paceline.rank_session import Task
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
    """The worker goes on with its script when it is answered."""
    return lambda rank: Asked(rank, 1, topic, value)


def dies(reason: str = "was killed by SIGKILL") -> Line:
    return lambda rank: Died(rank, reason)


@dataclass(frozen=True)
class Unheard:
    line: Line

    def __call__(self, rank: int) -> Event | PartSaved:
        return self.line(rank)


def unheard(*lines: Line) -> list[Line]:
    """What the worker has already sent when the line before is heard: each poll hands over one of them, as ever, and an
    abort what is left. Of other lines, an abort finds nothing: the worker had not come so far."""
    return [Unheard(line) for line in lines]


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

    def connect(self) -> None:
        pass

    def group(self, size: Size, resources: Resources, preload: Preload) -> "ScriptedGroup":
        self.groups.append(ScriptedGroup(self._attempts, self._size or size.min))
        return self.groups[-1]

    def has_room_beside(self, resources: Resources) -> bool:
        return False

    def describe(self) -> str:
        return "scripts"


class ScriptedGroup:
    """See `WorkerGroup` for the contract: `tests/contract/test_scripted.py` holds it and real groups to it. Every call
    of an attempt plays that rank's script from its beginning, and does not listen to `request_stop`.

    For a look afterwards: `calls`, the last one of each rank; `answers`, those that somebody waited for;
    `stop_requested`, at any time. `has_room` is what `can_grow` answers, for a test to set.
    """

    def __init__(self, attempts: Iterator[Scripts | Callable[[Start], Scripts]], size: int):
        self._attempts, self._size = attempts, size
        self._next: Scripts | Callable[[Start], Scripts] = ()
        self._scripts: dict[int, deque[Line]] = {}
        self._busy: set[int] = set()
        self._open: dict[int, Asked] = {}
        self._store: CheckpointStore | None = None
        self.infos: Sequence[WorkerInfo] = ()
        self.calls: dict[int, Call] = {}
        self.answers: list[tuple[Asked, Any]] = []
        self.has_room = self.stop_requested = self._alive = False
        self.num_starts = self.num_aborts = 0

    def start(self) -> None:
        self._end()
        try:
            self._next = next(self._attempts)
        except StopIteration:
            self.close()
            raise WorkerStartError(f"The script has no attempt after {self.num_starts} of them.") from None
        self._alive = True
        self.num_starts += 1
        size = self._size if callable(self._next) else len(self._next)
        self.infos = [WorkerInfo(Place(rank, rank, 0, size, size), 0, "script") for rank in range(size)]

    def submit(self, calls: Mapping[int, Call], logs: Mapping[int, Path] | None = None) -> None:
        self.calls.update(calls)
        scripts = self._next
        for task in (arg for call in calls.values() for arg in call.args if isinstance(arg, Task)):
            self._store = CheckpointStore(task.start.root, open_storage(task.start.root), task.start.token)
            scripts = scripts(task.start) if callable(scripts) else scripts
        assert not callable(scripts), "scripts that depend on the start are for training functions"
        self._scripts.update({rank: deque(scripts[rank]) for rank in calls})
        self._busy.update(calls)

    def poll(self, timeout_s: float, deliver: Callable[[Event], None]) -> None:
        for rank in sorted(self._scripts):
            if self._scripts.get(rank) and rank not in self._open:
                deliver(self._play(rank))

    def _play(self, rank: int) -> Event:
        script = self._scripts[rank]
        event = self._event(script.popleft()(rank))
        if isinstance(event, Returned | Raised):
            assert rank in self._busy, f"the script of rank {rank} answers one call twice: {event}"
            self._busy.discard(rank)
        elif isinstance(event, Died):
            assert not script, f"the script of rank {rank} goes on after its death"
            self._alive = False
        elif isinstance(event, Asked):
            self._open[rank] = event
        return event

    def _event(self, event: Event | PartSaved) -> Event:
        if not isinstance(event, PartSaved):
            return event
        if event.files:
            assert self._store is not None, "a part is saved in a training function"
            self._store.put(event.part.id, event.files)
        return Sent(event.part.rank, "part", event.part)

    def answer(self, question: Asked, value: Any) -> None:
        if self._open.get(question.rank) is question:
            del self._open[question.rank]
            self.answers.append((question, value))

    def can_grow(self) -> bool:
        return self.has_room

    def request_stop(self) -> None:
        self.stop_requested = True

    def stacks(self, timeout_s: float = 2.0) -> dict[int, str]:
        if not self.infos:
            raise StackDumpError("There are no workers: stacks can be had between start() and shutdown().")
        return {info.rank: "a scripted worker has no stack\n" for info in self.infos}

    def abort(self, deliver: Callable[[Event], None]) -> None:
        self.num_aborts += 1
        self._alive = False
        for rank, script in sorted(self._scripts.items()):
            while script and isinstance(script[0], Unheard) and rank not in self._open:
                deliver(self._play(rank))
        self._end()

    def healthy(self) -> bool:
        return self._alive and not self._busy

    def close(self, grace_s: float = 0.0) -> None:
        self._end()
        self.infos = ()

    def _end(self) -> None:
        self._alive = False
        for ended in (self._scripts, self._busy, self._open):
            ended.clear()
