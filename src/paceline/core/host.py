"""A run without a driver, on rank 0: what the sessions of all ranks send goes to the recorder, in this process.

    rank 0             its own thread hands over what it sends; an error of a callback is raised there
    the other ranks    the hub's thread does it for them; what goes wrong then is raised in all, at their next call

It decides nothing but when ranks stop, and that a run of which a rank is lost has failed: nobody here could start it
anew.
"""

import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol

from paceline.control.attempt import SETTLE_SUSPECT_S, Facts, StopAgreement
from paceline.control.notes import TOPICS, Notes
from paceline.errors import (
    PacelineError,
    ReportMismatchError,
    SaveMismatchError,
    TrainerStateError,
    WorkerError,
    WorkersLostError,
)
from paceline.recording.gather import Mismatch
from paceline.recording.recorder import Recorder
from paceline.workers.base import Asked, Died, Place
from paceline.workers.outcome import Error, message_of, raised
from paceline.workers.questions import Questions
from paceline.workers.reports import unpack

STOP_PATIENCE_S = 10.0
_ASK_TIMEOUT_S = 600.0


class Peers(Protocol):
    """The other ranks."""

    def post(self, rank: int, message: tuple[Any, ...]) -> None:
        """Returns at once; nothing happens if the rank is gone."""

    def fail(self, error: PacelineError) -> None:
        """The run has failed: who waits for others in a collective gets this error, and all learn of it."""


class Host:
    """From the beginning of a run to its end. Thread-safe."""

    def __init__(self, recorder: Recorder, size: int, peers: Peers, clock: Callable[[], float] = time.monotonic):
        self.recorder, self.size, self.facts = recorder, size, Facts(size)
        self.stopping = False
        self.error: BaseException | None = None
        """Why the run has failed, though this rank may not know it yet."""
        self.is_ended = False
        """Whether that is no failure: a rank was ended by a signal."""
        self.failed_at: float | None = None
        self.wished: str | None = None
        """What a signal, on whichever rank, was for: when the run has ended, it takes effect on all of them. One that
        goes on by itself would wait for the others in its next collective."""
        self.questions = Questions()
        """Of rank 0, which waits for an answer like all others."""
        self._peers, self._clock = peers, clock
        self._turn = threading.RLock()
        self._news = threading.Condition(self._turn)
        self._searches: list[Asked] = []
        self._stops, self._notes = StopAgreement(STOP_PATIENCE_S), Notes()

    def take(self, rank: int, kind: str, value: Any) -> None:
        """What a rank's session has sent. Raises what a callback raises; then the run has failed."""
        with self._turn:
            if kind == "leaving":
                self.facts.leaving.add(rank)
                return
            try:
                self.recorder.take(rank, kind, value)
            except BaseException as error:
                self.fail(error)
                raise
            self._look_around()

    def ask(self, question: Asked) -> None:
        with self._turn:
            if question.topic == "stop":
                self._stops.take(question.rank, question, self._clock())
                self._settle_stops()
            elif question.topic in TOPICS:
                for answered, value in self._notes.take(question):
                    self._answer(answered, value)
            elif question.topic == "checkpoint":
                self._searches.append(question)
                self._answer_searches()
            else:
                self._answer(question, self.recorder.answer(question.topic, question.value))

    def request_stop(self, kind: str) -> None:
        """Somebody wants an end, of this `Wish.kind`: all ranks learn of it. Not for signal handlers."""
        self.stopping = True
        with self._turn:
            self.wished = self.wished or kind
            self.recorder.leave()
            for rank in range(1, self.size):
                self._peers.post(rank, ("stop",))

    def end(self, rank: int, error: Error | None = None, is_stop: bool = False) -> None:
        """The rank has left the block, in this way; `is_stop` says that it was ended, and has not failed."""
        with self._turn:
            if error is None:
                self.facts.values[rank] = None
                try:
                    self.recorder.end(rank)
                except BaseException as problem:  # of a callback, that hears of the last steps
                    self.fail(problem)
                    raise
                self._look_around()
            else:
                self.facts.raised.append(raised(rank, error))
                how = "was ended" if is_stop else "has failed"
                self.is_ended = is_stop and self.error is None
                self.fail(WorkerError(f"Rank {rank} {how}: {error[0]}: {error[1]}"))
            self._news.notify_all()

    def lose(self, rank: int, reason: str) -> None:
        """The rank is gone without a word."""
        with self._turn:
            if self.facts.has_ended(rank):
                return
            self.facts.died.append(Died(rank, reason))
            self.recorder.folder.record_event("worker_died", rank=rank, reason=reason)
            self.fail(WorkersLostError(f"Rank {rank} is gone: {reason}. Its own output may say why."))

    def fail(self, error: BaseException) -> None:
        """All ranks raise it at their next call. The first one counts."""
        with self._turn:
            if self.error is not None:
                return
            self.error, self.failed_at = error, self._clock()
            if self.size > 1:
                told = error if isinstance(error, PacelineError) else WorkerError(f"On rank 0: {described(error)}")
                self.stopping = True
                self.questions.abandon(told)
                self._peers.fail(told)
            self._news.notify_all()

    def tick(self) -> None:
        """Some times a second, while there are other ranks."""
        with self._turn:
            try:
                self.recorder.tick()
                self.recorder.folder.flush()
            except BaseException as error:  # a callback may call sys.exit: in the hub's thread nobody would hear of it
                self.fail(error)
            self._look_around()
            self._settle_stops()

    def wait_for_others(self, timeout_s: float) -> None:
        """Until all ranks have left the block. Raises why the run has failed; WorkersLostError after the timeout."""
        with self._news:
            self._news.wait_for(lambda: self.error is not None or self.facts.num_ended == self.size, timeout_s)
            if self.error is None and (late := sorted(self._running())):
                names = ", ".join(map(str, late))
                self.fail(WorkersLostError(f"Rank {names} has not left the block within {timeout_s:g} s of rank 0."))
        if self.error is not None:
            raise self.error

    def wait_for_cause(self) -> None:
        """An error that may be the echo of another rank's end has come: wait, not for long, for that."""
        with self._news:
            self._news.wait_for(lambda: self.error is not None, SETTLE_SUSPECT_S if self.size > 1 else 0.0)

    def _running(self) -> set[int]:
        ended = {*(error.rank for error in self.facts.raised), *(died.rank for died in self.facts.died)}
        return set(range(self.size)) - self.facts.values.keys() - ended

    def _look_around(self) -> None:
        self._answer_searches()
        if self.size > 1 and self.facts.values and not self.stopping and self.error is None:
            mismatch = self.recorder.mismatch()
            if mismatch is not None:
                kind = ReportMismatchError if isinstance(mismatch, Mismatch) else SaveMismatchError
                self.fail(kind(str(mismatch)))

    def _answer_searches(self) -> None:
        searches, self._searches = self._searches, []
        for question in searches:
            found = self.recorder.find(question.value, question.rank)
            if found is None:
                self._searches.append(question)
            else:
                self._answer(question, found)

    def _settle_stops(self) -> None:
        for question, call in self._stops.settle(self._running(), self._clock()):
            self._answer(question, call)

    def _answer(self, question: Asked, value: Any) -> None:
        if question.rank:
            self._peers.post(question.rank, ("answer", question.number, value))
        else:
            self.questions.answer(question.number, value)


class HostWire:
    """Rank 0's end of no connection, see `Wire`: what its session sends is recorded before `send` returns."""

    def __init__(self, place: Place, host: Host, address: str = "127.0.0.1"):
        self.place, self._host, self.address = place, host, address
        self.shared: dict[str, Any] = {}
        self.leaving = ExitStack()
        self.is_spent = False
        self._owner_pid = os.getpid()

    @property
    def stopping(self) -> bool:
        return self._host.stopping

    def report(self, packed: bytes) -> None:
        self._check()
        self._host.take(0, "report", unpack(packed))

    def send(self, kind: str, value: Any) -> None:
        self._refuse_forks()
        self._host.take(0, kind, value)

    def ask(self, topic: str, value: Any, timeout_s: float | None = None) -> Any:
        self._check()
        host = self._host
        return host.questions.ask(
            lambda number: host.ask(Asked(0, number, topic, value)), _ASK_TIMEOUT_S if timeout_s is None else timeout_s
        )

    def flush(self) -> None:
        pass

    def _check(self) -> None:
        """What other ranks have come to is news; what a callback has raised in this very thread is not."""
        self._refuse_forks()
        if self._host.size > 1 and self._host.error is not None:
            raise self._host.error

    def _refuse_forks(self) -> None:
        """There, nobody records; and a lock that another thread held stays locked."""
        if os.getpid() != self._owner_pid:
            raise TrainerStateError("This process was forked from the one that records the run: report and save there.")


class Nobody:
    """The other ranks of a single process. See `Peers`."""

    def post(self, rank: int, message: tuple[Any, ...]) -> None:
        pass

    def fail(self, error: PacelineError) -> None:
        pass


def described(error: BaseException) -> str:
    return f"{type(error).__qualname__}: {message_of(error)}"
