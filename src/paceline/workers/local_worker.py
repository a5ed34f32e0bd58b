"""A worker on this machine, as its group knows it: the process, the connection to it, and how it has ended."""

import contextlib
import os
import select
import signal
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from paceline.errors import WorkerStartError
from paceline.workers import outcome, parcel
from paceline.workers.base import DIRECT, Asked, Died, Event, Place, Preempted, Sent
from paceline.workers.framing import FrameReader, UnreadError, is_hang_up, send_patiently, write_patiently
from paceline.workers.nursery import Nursery
from paceline.workers.output import LogTail
from paceline.workers.pipes import kept, new_pipe
from paceline.workers.reports import Report, unpack

END_S = 5.0
"""How long a worker may take to end that was killed."""

_TELL_S = 30.0
"""How long a worker may take to make room for something it is told: who reads it does nothing else."""


_REPORT_BYTES = 1 << 20
"""How many reports may wait while the driver does something else, before `report` waits too."""


class Line:
    """The connection to one worker: a socket for commands, and pipes for direct answers, messages and reports. A pipe
    wakes nobody but who waits for what goes into it, and what is in it outlives the worker. The socket can be shut down
    though a child of this process has inherited it."""

    def __init__(self) -> None:
        with ExitStack() as theirs, ExitStack() as ours:
            self._commands, commands = socket.socketpair()
            ours.callback(self._commands.close)
            theirs.callback(commands.close)
            answers, self._answers = (kept(end, fd) for end, fd in zip((theirs, ours), new_pipe(), strict=True))
            self.fd, messages = (kept(end, fd) for end, fd in zip((ours, theirs), new_pipe(), strict=True))
            pipe = new_pipe(_REPORT_BYTES)
            self._report_fd, reports = (kept(end, fd) for end, fd in zip((ours, theirs), pipe, strict=True))
            self.worker_fds = (commands.fileno(), answers, messages, reports)
            commands.setblocking(True)  # whatever socket.setdefaulttimeout says here
            for fd in (self._commands.fileno(), self._answers, self.fd, self._report_fd):
                os.set_blocking(fd, False)
            self.close_worker_end, self.files = theirs.pop_all().close, ours.pop_all()
        self._close_files = weakref.finalize(self, self.files.close)  # also of a group that is dropped
        self._close_files.atexit = False
        self.messages, self._reports = FrameReader(self.fd), FrameReader(self._report_fd)

    def send(self, command: Any) -> None:
        """One thread at a time."""
        try:
            send_patiently(self._commands, command, _TELL_S)
        except UnreadError:
            pass
        except OSError as error:
            if not is_hang_up(error):  # a dead worker is reported by poll
                raise

    def answer(self, value: Any) -> None:
        try:
            write_patiently(self._answers, parcel.quick_dumps(value), _TELL_S)
        except UnreadError:  # half of it is there, and no other may follow
            with contextlib.suppress(OSError):
                self._commands.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            if not is_hang_up(error):
                raise

    def reports(self) -> list[Report]:
        """What is in the pipe now."""
        return [unpack(body) for body in self._reports.bodies()]

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._commands.shutdown(socket.SHUT_RDWR)  # a child of this process may have inherited it
        self._close_files()


class Worker:
    """One worker process as its group knows it."""

    def __init__(self, spec: dict[str, Any], nursery: Nursery):
        self.place: Place = spec["place"]
        self.rank = self.place.world_rank
        self.line = Line()
        self.stacks_path = Path(spec["stacks_path"])
        self.pid, self.pidfd = 0, -1
        self._is_over = self._busy = False
        self._one_writer = threading.Lock()
        self._is_stop_due = False
        self._nursery, self._number = nursery, nursery.new_number()
        self._log = LogTail(Path(spec["log_path"]))
        self._old_log: LogTail | None = None

    def start(self, spec: dict[str, Any]) -> None:
        with self._one_writer:  # it is told nothing before what it has to know
            try:
                self.pid = self._nursery.fork(self._number, self.line.worker_fds, spec["scratch_dir"])
                self.pidfd = kept(self.line.files, os.pidfd_open(self.pid))
            except ProcessLookupError:
                raise WorkerStartError(f"Rank {self.rank} ended with the process it was forked from.") from None
            finally:
                self.line.close_worker_end()
            self.line.send(spec)

    @property
    def alive(self) -> bool:
        """From `start` until the nursery was asked how it ended: from then on, its pid may be somebody else's."""
        return self.pidfd >= 0 and not self._is_over

    def begin(self, payload: bytes, log_path: Path | None) -> None:
        self._busy = True
        if log_path is not None and log_path != self._log.path:
            if self._old_log is not None:
                self._old_log.close()
            self._old_log, self._log = self._log, LogTail(log_path, at_end=True)
        self.tell("call", payload, str(log_path) if log_path else None)

    def answer(self, number: int, value: Any) -> None:
        if number == DIRECT:
            self.line.answer(value)
        else:
            self.tell("answer", number, value)

    def tell(self, *message: Any) -> None:
        with self._one_writer:
            self.line.send(message)
        if self._is_stop_due:
            self._send_stop_if_due()

    def request_stop(self) -> None:
        """From any thread, or a signal handler in the middle of `tell`, which then says it when it is done."""
        self._is_stop_due = True
        self._send_stop_if_due()

    def _send_stop_if_due(self) -> None:
        while self._is_stop_due and self.alive and self._one_writer.acquire(blocking=False):
            try:
                self._is_stop_due = False
                self.line.send(("stop",))
            finally:
                self._one_writer.release()

    def events(self, is_gone: bool, is_due: bool = True) -> list[Event]:
        """What has arrived. Reports come first, since they were made before the messages that are here by now, and the
        death of the process comes after everything it sent. Without messages, they are looked for when they are due."""
        sent: list[Event] = []
        has_reported = is_due or is_gone
        for body in self.line.messages.bodies():
            try:
                kind, value, is_after_reports = parcel.loads(body)
            except (Exception, SystemExit) as error:  # of a class of the user's, which cannot be had here
                sent.append(outcome.raised(self.rank, outcome.describe_error(error)))
                continue
            has_reported = has_reported or is_after_reports
            sent.append(self._event(kind, value))
        if not has_reported:
            return sent
        events = [*(Sent(self.rank, "report", report) for report in self.line.reports()), *sent]
        if is_gone:
            events.append(Died(self.rank, how_it_ended(self._status())))
        return events

    def _event(self, kind: str, value: Any) -> Event:
        if kind == "asked":
            return Asked(self.rank, *value)
        if kind == "returned":
            self._busy = False
            return outcome.returned(self.rank, value)
        if kind == "raised":
            self._busy = False
            return outcome.raised(self.rank, value)
        if kind == "preempted":
            return Preempted(self.rank, value)
        return Sent(self.rank, kind, value)

    @property
    def has_answered(self) -> bool:
        return not self._busy or self._is_over

    def printed(self) -> Iterator[str]:
        if self._old_log is not None:
            yield from self._old_log.texts()
            self._old_log.close()
            self._old_log = None
        yield from self._log.texts()

    def is_idle(self) -> bool:
        return self.alive and not self._busy and not self.wait(0)

    def dismiss(self) -> None:
        self.tell("exit")

    def end(self, deadline: float) -> None:
        """Wait as long as allowed, then kill the worker and whatever it has started."""
        try:
            if self.alive:
                self.wait(max(0.0, deadline - time.monotonic()))
                self.kill()
                self.wait(END_S)
                self._status()
        finally:
            if not self._is_over:  # the start was interrupted, or this
                self._nursery.end_unseen(self._number)
            for log in filter(None, (self._old_log, self._log)):
                log.close()
            self.line.close()

    def kill(self) -> None:
        """With its process group. What it has started in other sessions is ended by the nursery."""
        if self.alive:
            self._kill()

    def _kill(self) -> None:
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(self.pid, signal.SIGKILL)

    def wait(self, timeout_s: float) -> bool:
        """Until the process has ended; says whether it has."""
        poller = select.poll()  # no select: a process may have more files than that knows
        poller.register(self.pidfd, select.POLLIN)
        return bool(poller.poll(timeout_s * 1000))

    def _status(self) -> int | None:
        self._is_over = True
        status = self._nursery.end(self._number)
        if status is None:  # the nursery has ended nobody
            self._kill()
        return status


def how_it_ended(status: int | None) -> str:
    """The wait status of a worker, in words; None if nobody knows it."""
    if status is None:
        return "ended; how is not known, since the process it was forked from has ended too or does not answer"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        hint = "; the kernel does this when memory runs out" if number == signal.SIGKILL else ""
        return f"was killed by {_signal_name(number)}{hint}"
    code = os.WEXITSTATUS(status)
    if code == 128 + signal.SIGTERM:
        return f"ended itself with exit code {code}, as it does when it gets SIGTERM while it has nothing to do"
    return f"ended itself with exit code {code} (os._exit, or exit in C code)"


def _signal_name(number: int) -> str:
    if number > signal.SIGRTMIN:  # most of the real-time signals have no name
        return f"SIGRTMIN+{number - signal.SIGRTMIN}"
    return signal.Signals(number).name
