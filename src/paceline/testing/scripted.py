"""An engine without processes: each worker plays a script of what it does, one event a poll.

engine = ScriptedEngine([[[*reports(3), dies("was killed")], [*reports(5), returns(None)]],     # first attempt
                         [[*reports(5), returns("a")],       [*reports(5), returns("b")]]])     # after the restart
Trainer(engine=engine, backend=BackendConfig(), num_workers=2).run(lambda: None)
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

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

Line = Callable[[int], Event]
"""An event that does not know its rank yet."""


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


def saves(info: Any) -> Line:
    """A checkpoint was committed."""
    return lambda rank: Sent(rank, "committed", info)


def asks(topic: str, value: Any = None) -> Line:
    return lambda rank: Asked(rank, 1, topic, value)


def dies(reason: str = "was killed by SIGKILL") -> Line:
    return lambda rank: Died(rank, reason)


class ScriptedEngine:
    """Plays one script for each rank in each attempt; `groups` are those it has made, for a look afterwards."""

    name = "scripted"

    def __init__(self, attempts: Sequence[Sequence[Sequence[Line]]]):
        self._attempts = deque(attempts)
        self.groups: list[ScriptedGroup] = []

    def warm(self, preload: Preload) -> None:
        pass

    def group(self, size: Size, resources: Resources, preload: Preload) -> "ScriptedGroup":
        self.groups.append(ScriptedGroup(self._attempts))
        return self.groups[-1]

    def describe(self) -> str:
        return "scripts"


class ScriptedGroup:
    """See `WorkerGroup` for the contract; it passes the same contract suite as the real ones where a script can."""

    def __init__(self, attempts: deque[Sequence[Sequence[Line]]]):
        self._attempts = attempts
        self._scripts: list[deque[Line]] = []
        self.infos: Sequence[WorkerInfo] = ()
        self.calls: dict[int, Call] = {}
        self.answers: list[tuple[Asked, Any]] = []
        self.has_room = self.stop_requested = self._alive = False
        self.num_starts = self.num_aborts = 0

    def start(self) -> None:
        self._scripts = [deque(script) for script in self._attempts.popleft()]
        self._alive = True
        self.num_starts += 1
        size = len(self._scripts)
        self.infos = [WorkerInfo(Place(rank, rank, 0, size, size), 0, "script") for rank in range(size)]

    def submit(self, calls: Mapping[int, Call], logs: Mapping[int, Path] | None = None) -> None:
        self.calls.update(calls)

    def poll(self, timeout_s: float, deliver: Callable[[Event], None]) -> None:
        for rank, script in enumerate(self._scripts):
            if script:
                event = script.popleft()(rank)
                self._alive = self._alive and not isinstance(event, Died)
                deliver(event)

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
