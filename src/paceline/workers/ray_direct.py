"""A short way between the driver and workers on its machine, past Ray, for a call that only waits for what the driver
says next: there and back takes a fifth of the time.

    worker   "asked", for a line     ──── Ray ────►   driver makes two pipes
    worker   opens them by /proc     ◄─── Ray ─────   where they are, or None if others are on other machines
    worker   tells whether it could  ──── Ray ────►   driver closes the ends that are the worker's
    worker   its questions           ═══ pipes ═══    their answers

Who cannot open the pipes, in a container of its own, goes on with Ray.
"""

import os
import select
import time
from contextlib import ExitStack
from typing import Any

from paceline.workers import outcome, parcel
from paceline.workers.base import DIRECT, Asked, Event
from paceline.workers.framing import FrameReader, UnreadError, is_hang_up, write_frame, write_patiently
from paceline.workers.pipes import kept, new_pipe, stay_awake
from paceline.workers.proc_files import Address, address_of, new_memory, opened

LINE = "paceline.line"
"""The topic by which a worker asks for its line."""

TELL_S = 30.0
"""How long a worker may take to make room for an answer: it waits for that."""

LineAddress = tuple[Address, Address, Address]
"""Something that no other machine has; where the worker reads; and where it writes."""


class Lines:
    """The driver's ends, by rank."""

    def __init__(self) -> None:
        self._lines: dict[int, _Line] = {}
        self._poller: select.epoll | None = None

    @property
    def num_settled(self) -> int:
        """How many are in use."""
        return sum(line.is_settled for line in self._lines.values())

    def make(self, rank: int) -> LineAddress:
        self._drop(rank)
        if self._poller is None:
            self._poller = select.epoll()
        line = _Line()
        try:
            self._poller.register(line.inbox, select.EPOLLIN)
        except BaseException:
            line.close()
            raise
        self._lines[rank] = line
        return line.address

    def settle(self, rank: int, is_open: bool) -> None:
        """The worker has opened what it was given, or could not."""
        if not is_open:
            self._drop(rank)
        elif rank in self._lines:
            self._lines[rank].settle()

    def questions(self, timeout_s: float) -> list[Event]:
        """What has come: questions, or the error of one that cannot be had here. A line whose worker has closed it is
        gone then."""
        assert self._poller is not None, "no line was made"
        ready, found = {fd for fd, _ in self._poller.poll(timeout_s)}, list[Event]()
        for rank, line in list(self._lines.items()):
            if line.inbox in ready:
                found += [_question(rank, body) for body in line.messages.bodies()]
                if line.messages.closed:
                    self._drop(rank)
        return found

    def last_questions(self, rank: int) -> list[Event]:
        """Of a worker that is gone. What it has asked comes before its end is told: who learns of it afterwards takes
        it for one that waits."""
        line = self._lines.get(rank)
        found = [] if line is None else [_question(rank, body) for body in line.messages.bodies()]
        self._drop(rank)
        return found

    def answer(self, rank: int, value: Any) -> None:
        """UnreadError if the worker does not read it, and the end of its line, with half of an answer in it."""
        if rank in self._lines:
            try:
                write_patiently(self._lines[rank].outbox, parcel.quick_dumps(value), TELL_S)
            except UnreadError:
                self._drop(rank)
                raise
            except OSError as error:
                if not is_hang_up(error):  # that a worker is gone, Ray tells
                    raise

    def clear(self) -> None:
        for rank in list(self._lines):
            self._drop(rank)
        if self._poller is not None:
            self._poller.close()
            self._poller = None

    def _drop(self, rank: int) -> None:
        line = self._lines.pop(rank, None)
        if line is not None and self._poller is not None:
            self._poller.unregister(line.inbox)
            line.close()


class _Line:
    def __init__(self) -> None:
        with ExitStack() as theirs, ExitStack() as ours:
            mark = kept(theirs, new_memory("line"))
            for_worker, self.outbox = (kept(end, fd) for end, fd in zip((theirs, ours), new_pipe(), strict=True))
            self.inbox, from_worker = (kept(end, fd) for end, fd in zip((ours, theirs), new_pipe(), strict=True))
            for fd in (self.outbox, self.inbox):
                os.set_blocking(fd, False)
            self.address: LineAddress = (address_of(mark), address_of(for_worker), address_of(from_worker))
            self.is_settled = False
            self._theirs, self._ours = theirs.pop_all(), ours.pop_all()
        self.messages = FrameReader(self.inbox)

    def settle(self) -> None:
        self.is_settled = True
        self._theirs.close()

    def close(self) -> None:
        self.settle()
        self._ours.close()


class LineEnd:
    """The worker's. OSError if it cannot be had here. For one thread; `wake` is for another."""

    def __init__(self, address: LineAddress):
        mark, for_worker, from_worker = address
        with ExitStack() as files:
            kept(files, opened(mark, os.O_RDONLY))
            self._inbox = kept(files, opened(for_worker, os.O_RDONLY | os.O_NONBLOCK))
            self._outbox = kept(files, opened(from_worker, os.O_WRONLY))
            self._wake = kept(files, os.eventfd(0, os.EFD_CLOEXEC))
            self.close = files.pop_all().close
        self._messages = FrameReader(self._inbox)
        self._poller = select.poll()
        self._poller.register(self._inbox, select.POLLIN)
        self._poller.register(self._wake, select.POLLIN)

    def ask(self, topic: str, value: Any) -> Any:
        """EOFError if there is no answer any more: the driver is gone, or `wake` was called."""
        write_frame(self._outbox, parcel.quick_dumps((topic, value)))
        stay_awake(self._poller, time.perf_counter())
        while not self._messages.closed:
            if self._wake in dict(self._poller.poll()):
                break
            for body in self._messages.bodies():
                return parcel.loads(body)
        raise EOFError

    def wake(self) -> None:
        os.eventfd_write(self._wake, 1)


def _question(rank: int, body: bytes | bytearray) -> Event:
    try:
        return Asked(rank, DIRECT, *parcel.loads(body))
    except (Exception, SystemExit) as error:  # of a class of the user's, which cannot be had here
        return outcome.raised(rank, outcome.describe_error(error))
