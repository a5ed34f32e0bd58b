"""The worker's own side, on one machine: a forked process that runs one call at a time in its main thread.

    main thread      runs the calls, so signal handlers and GUIs behave as in a script
    reader thread    takes commands off a socket; when that closes, the driver is gone and so is this process

What it tells goes into pipes, one for reports and one for everything else. What is in a pipe outlives the process that
wrote it: a report is safe when `report` returns, though nobody has looked at it yet, and a full pipe makes a too fast
loop wait.
"""

import contextlib
import ctypes
import faulthandler
import gc
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from collections import deque
from typing import Any, NoReturn

from paceline.errors import TrainerStateError
from paceline.frameworks import generators
from paceline.workers import parcel
from paceline.workers.base import DIRECT, Place
from paceline.workers.edits import user_files
from paceline.workers.framing import is_hang_up, read_frame, recv_message, write_frame
from paceline.workers.garbage import Garbage
from paceline.workers.heap import keep_freed_memory
from paceline.workers.nursery_process import adopt_orphans
from paceline.workers.outcome import describe_error, pack_value
from paceline.workers.output import flush_output, redirect_output
from paceline.workers.pipes import stay_awake
from paceline.workers.questions import Questions, answered
from paceline.workers.sigterm import on_sigterm

_PR_SET_PDEATHSIG = 1
_ASKED_AMIDST = (
    "A signal handler has asked the driver something, as load_checkpoint() does, in the midst of a message of the code "
    "that it has interrupted: it would wait for ever. Let it set a flag, and ask in the loop."
)


def worker_main(nursery_pid: int, commands: socket.socket, answers: int, messages: int, reports: int) -> None:
    """With the other ends of what `local_worker.Line` has."""
    _leave_the_nursery(nursery_pid)
    try:
        spec = recv_message(commands)
    except (EOFError, OSError):  # nobody wants this worker any more
        os._exit(1)
    _settle(spec)
    wire = ProcessWire(answers, messages, reports, spec["place"])
    on_sigterm(wire.preempt)
    garbage = Garbage()
    calls: queue.SimpleQueue[tuple[bytes, str | None] | None] = queue.SimpleQueue()
    threading.Thread(target=_read_commands, args=(commands, wire, calls), name="paceline-reader", daemon=True).start()
    while (call := calls.get()) is not None:
        payload, log_path = call
        if log_path is not None:
            redirect_output(log_path)
        _answer(wire, payload)
        wire.num_done += 1
        wire.end_if_preempted()
        garbage.collect()
    os._exit(0)


class ProcessWire:
    """This worker's end of the connection. Thread-safe but for `report`: the session has one thread do that at a
    time."""

    def __init__(self, answer_fd: int, message_fd: int, report_fd: int, place: Place):
        self.place = place
        self.address = "127.0.0.1"
        self._answer_fd, self._message_fd, self._report_fd = answer_fd, message_fd, report_fd
        self._answers = select.poll()
        self._answers.register(answer_fd, select.POLLIN)
        self.shared: dict[str, Any] = {}
        self.leaving = contextlib.ExitStack()  # never closed: this process ends with its group inside it
        self.is_spent = self.stopping = False
        self.num_begun = self.num_done = 0
        """Calls. The reader counts the one, the main thread the other: the next may come before the last is done."""
        self.questions = Questions()
        self._is_preempted = False
        self._reports: deque[bytes] = deque()
        self._is_writing = False
        self._num_reports = self._num_told = 0
        """How many were made; and how many had been, when the driver was last told of any. No flag that is set and
        cleared: a report may be made while a message is sent."""
        self._send_lock, self._is_sending = threading.RLock(), False
        self._postponed: deque[tuple[str, Any]] = deque()

    def report(self, packed: bytes) -> None:
        if self._is_writing:  # we are in a signal handler: whom it has interrupted writes this too
            self._reports.append(packed)
            return
        self._is_writing = True
        try:
            write_frame(self._report_fd, packed)
        finally:
            self._is_writing = False
            self._num_reports += 1
        while self._reports:
            self.report(self._reports.popleft())

    def send(self, kind: str, value: Any) -> None:
        """With it goes whether the pipe has reports that were made before."""
        with self._send_lock:
            if self._is_sending:  # we are in a signal handler: whom it has interrupted sends this too
                if kind == "asked":
                    raise TrainerStateError(_ASKED_AMIDST)
                self._postponed.append((kind, value))
                return
            self._is_sending = True
            try:
                num_reports = self._num_reports
                packed = parcel.quick_dumps((kind, value, self._num_told < num_reports))
                self._num_told = num_reports
                write_frame(self._message_fd, packed)
            finally:
                self._is_sending = False
            while self._postponed:
                self.send(*self._postponed.popleft())

    def ask(self, topic: str, value: Any, timeout_s: float | None = None) -> Any:
        return self.questions.ask(lambda number: self.send("asked", (number, topic, value)), timeout_s)

    def ask_directly(self, topic: str, value: Any) -> Any:
        self.send("asked", (DIRECT, topic, value))
        stay_awake(self._answers, time.perf_counter())
        try:
            frame = read_frame(self._answer_fd)
        except (EOFError, OSError) as error:
            if isinstance(error, OSError) and not is_hang_up(error):  # a signal handler of the model's has raised it
                raise
            _end_without_driver()
        return answered(parcel.loads(frame))

    def hang_up(self) -> None:
        """Nothing to do: the pipe is there anyway."""

    def preempt(self) -> None:
        """The machine, or whoever owns it, wants this process gone. In a call, that is the driver's business: it lets
        the function save first."""
        self._is_preempted = True
        self.end_if_preempted()
        self.send("preempted", "got SIGTERM")
        self.stopping = True  # afterwards, so that the driver knows why the function returns

    def end_if_preempted(self) -> None:
        """Once everything that was asked of this worker is answered. It may have been told in the moment after that."""
        if self._is_preempted and self.num_begun == self.num_done:
            os._exit(128 + signal.SIGTERM)

    def flush(self) -> None:
        """Nothing to do: the pipes outlive the process."""


def _read_commands(
    commands: socket.socket, wire: ProcessWire, calls: "queue.SimpleQueue[tuple[bytes, str | None] | None]"
) -> None:
    while True:
        try:
            verb, *args = recv_message(commands)
        except BaseException:  # what it says makes no sense, if anything
            _end_without_driver()
        if verb == "call":
            wire.stopping = False
            wire.num_begun += 1
            calls.put((args[0], args[1]))
        elif verb == "answer":
            wire.questions.answer(*args)
        elif verb == "stop":
            wire.stopping = True
        elif verb == "exit":
            calls.put(None)


def _end_without_driver() -> NoReturn:
    """Nothing that we have started may stay."""
    os.killpg(0, signal.SIGKILL)
    raise AssertionError("we are in that group")


def _answer(wire: ProcessWire, payload: bytes) -> None:
    try:
        fn, args = parcel.loads(payload)
        value = pack_value(fn(wire, *args))
    except BaseException as error:
        flush_output()  # first: who has the answer does not look for more output
        wire.send("raised", describe_error(error))
        del error
    else:
        flush_output()
        wire.send("returned", value)


def _leave_the_nursery(nursery_pid: int) -> None:
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != nursery_pid:  # it died between the fork and the line above
        os._exit(1)
    adopt_orphans()


def _settle(spec: dict[str, Any]) -> None:
    """Take over the driver's surroundings."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.enable()
    os.environ.clear()
    os.environ.update(spec["environ"])
    sys.path[:] = spec["sys_path"]
    sys.argv[:] = spec["argv"]
    with contextlib.suppress(OSError):
        os.chdir(spec["cwd"])
    user_files.forget_edited()
    generators.reseed()
    keep_freed_memory()
    redirect_output(spec["log_path"])
    stacks = os.open(spec["stacks_path"], os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    faulthandler.enable(file=2)
    time.tzset()
