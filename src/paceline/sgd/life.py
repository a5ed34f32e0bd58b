"""When a DistributedSGD may be called, and by whom; and what ends it."""

import atexit
import os
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

from paceline.control.termination import Signals
from paceline.errors import TrainerStateError, WorkersLostError, WorkerStartError
from paceline.sgd.team import Team

R = TypeVar("R")


class Life:
    """Of one team, from its first call to its end."""

    def __init__(self, team: Team):
        self._team = team
        self._is_over = False
        self._ended_in: int | None = None
        """The thread that has ended it."""
        self._one_thread, self._owner_pid = threading.RLock(), os.getpid()
        self._turn, self._failing = _Turn(self._one_thread, self._check), _Failing(self)

    def begin(self) -> "_Failing":
        """Around the start of the workers: they are this process's."""
        self._owner_pid = os.getpid()
        atexit.register(self.end_with_program)
        return self.failing()

    def turn(self) -> "_Turn":
        """Around every call. Within one, the same thread may make another: a callback that saves a checkpoint, say. But
        not while the workers are being asked something, as from the handler of a signal: their answers would be
        confused."""
        return self._turn

    def failing(self) -> "_Failing":
        return self._failing

    def staying(self, act: Callable[[], R]) -> R:
        """What a function of the user's raises is no end of the run, as long as all workers are there for the next."""
        try:
            return act()
        except BaseException as error:
            is_end = not isinstance(error, Exception) or isinstance(error, WorkersLostError | WorkerStartError)
            if is_end or self._team.link.is_torn or self._team.is_asking:  # a handler has raised where that is put back
                self.end_surely(error)
            self.tell_if_ended_meanwhile(error)
            raise

    def shut_down(self) -> None:
        with _Turn(self._one_thread, lambda: None):
            if not self._is_over:
                self._check_rest()
                self.end_with(None)

    def end_with(self, error: BaseException | None) -> None:
        """Idempotent. Ctrl-C and SIGTERM wait until it is done: half of it would leave workers behind, and a run that
        seems to go on."""
        if self._is_over:
            return
        signals = Signals()
        with signals.watching():
            self._is_over, self._ended_in = True, threading.get_ident()
            atexit.unregister(self.end_with_program)
            self._team.close(*_end_of(error))
        signals.release()
        signals.check(1)

    def end_surely(self, error: BaseException) -> None:
        """Also if a signal handler raises, for the second time, before the first line of it."""
        try:
            self.end_with(error)
        except BaseException:
            self.end_with(error)
            raise

    def tell_if_ended_meanwhile(self, error: BaseException) -> None:
        """Whoever has lost the workers to another thread, which has left the block or the program, has an error that
        speaks of something else."""
        if self._is_over and self._ended_in != threading.get_ident() and isinstance(error, Exception):
            raise TrainerStateError(
                "Another thread has ended this DistributedSGD in the middle of this call: let the threads that use it "
                "come to their end before."
            ) from error

    def end_with_program(self) -> None:
        """A script need not call `shutdown`: when it ends well, the run has. At a prompt, no error ends the program."""
        self.end_with(None if hasattr(sys, "ps1") else getattr(sys, "last_value", None))

    def _check(self) -> None:
        if self._is_over:
            raise TrainerStateError("This DistributedSGD has ended: make a new one, and restore a checkpoint to go on.")
        if self._team.record is not None and self._owner_pid != os.getpid():
            raise TrainerStateError(
                f"The workers of this DistributedSGD are those of process {self._owner_pid}; this one, {os.getpid()}, "
                "is a fork of it: make a new one here."
            )
        self._check_rest()

    def _check_rest(self) -> None:
        if self._team.is_asking:
            raise TrainerStateError(
                "This DistributedSGD is in the middle of a call, and was called again: from the handler of a signal, a "
                "function that it has called, or a callback that is told of the beginning or a restart. Do it when "
                "that call has returned."
            )


class _Turn:
    """One thread at a time. A generator would cost every step a few microseconds more."""

    __slots__ = ("_check", "_one_thread")

    def __init__(self, one_thread: Any, check: Callable[[], None]):
        self._one_thread, self._check = one_thread, check

    def __enter__(self) -> None:
        if not self._one_thread.acquire(blocking=False):
            raise TrainerStateError(
                "Another thread is in a call of this DistributedSGD, which is for one at a time: let this one wait for "
                "it, or make a second DistributedSGD."
            )
        try:
            self._check()
        except BaseException:
            self._one_thread.release()
            raise

    def __exit__(self, *raised: object) -> None:
        self._one_thread.release()


class _Failing:
    """Whatever is raised inside ends the run, which has failed then, or was stopped."""

    __slots__ = ("_life",)

    def __init__(self, life: Life):
        self._life = life

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._life.end_surely(error)
            self._life.tell_if_ended_meanwhile(error)


def _end_of(error: BaseException | None) -> tuple[str, BaseException | None]:
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):  # a script leaves in good order
        return "SUCCEEDED", None
    return ("STOPPED" if isinstance(error, KeyboardInterrupt) else "FAILED"), error
