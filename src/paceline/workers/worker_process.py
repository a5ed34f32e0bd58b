"""The worker's own side, on one machine: a forked process that runs one call at a time in its main thread.

    main thread      runs the calls, so signal handlers, debuggers and GUIs behave as in a script
    reader thread    takes commands off the socket; when the socket closes, the driver is gone and so is this process
    sender thread    ships whatever was queued, in batches
"""

import contextlib
import ctypes
import faulthandler
import gc
import io
import os
import pickle
import queue
import random
import signal
import socket
import sys
import threading
import time
import traceback
from typing import Any

from paceline.errors import TrainFunctionError
from paceline.workers import parcel
from paceline.workers.base import Place
from paceline.workers.framing import recv_message, send_message

BATCH_S = 0.05
"""A lone report leaves at once; a stream of them leaves in batches this far apart."""

QUEUE_LIMIT = 10_000
"""Messages that may wait for a slow driver before `report` itself waits."""

_PR_SET_PDEATHSIG = 1


def worker_main(sock: socket.socket, spec: dict[str, Any]) -> None:
    _leave_the_nursery(spec)
    wire = SocketWire(sock, spec["place"])
    commands: queue.SimpleQueue[tuple[bytes, str | None] | None] = queue.SimpleQueue()
    threading.Thread(target=_read_commands, args=(wire, commands), name="paceline-reader", daemon=True).start()
    while (command := commands.get()) is not None:
        payload, log_path = command
        if log_path is not None:
            _redirect_output(log_path)
        _answer(wire, payload)
        _flush_output()
        gc.collect()  # a DDP model in a reference cycle must not outlive its process group
    wire.flush()
    os._exit(0)


class SocketWire:
    """A bounded queue and the thread that empties it into the socket."""

    def __init__(self, sock: socket.socket, place: Place):
        self.place = place
        self.sock = sock
        self.shared: dict[str, Any] = {}
        self.stop_requested = False
        self._waiting: list[tuple[str, bytes]] = []
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._filled, self._urgent = threading.Event(), threading.Event()
        self._sent = threading.Condition(self._lock)
        self._sending = False
        threading.Thread(target=self._send_batches, name="paceline-sender", daemon=True).start()

    @property
    def stopping(self) -> bool:
        return self.stop_requested

    def send(self, kind: str, value: Any) -> None:
        self.send_packed(kind, pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))

    def send_packed(self, kind: str, value: bytes) -> None:
        with self._lock:
            while len(self._waiting) >= QUEUE_LIMIT:
                self._room.wait()
            self._waiting.append((kind, value))
            if len(self._waiting) == 1:
                self._filled.set()

    def flush(self) -> None:
        """Block until everything queued so far is in the socket."""
        self._urgent.set()
        with self._lock:
            while self._waiting or self._sending:
                self._filled.set()
                self._sent.wait(timeout=1.0)

    def _send_batches(self) -> None:
        while True:
            self._filled.wait()
            self._filled.clear()
            with self._lock:
                batch, self._waiting = self._waiting, []
                self._sending = True
                self._room.notify_all()
            with contextlib.suppress(ConnectionError):  # the reader notices that the driver is gone
                if batch:
                    send_message(self.sock, batch)
            with self._lock:
                self._sending = False
                self._sent.notify_all()
            self._urgent.wait(BATCH_S)
            self._urgent.clear()


def _read_commands(wire: SocketWire, commands: "queue.SimpleQueue[tuple[bytes, str | None] | None]") -> None:
    while True:
        try:
            verb, *args = recv_message(wire.sock)
        except (EOFError, OSError):
            os.killpg(0, signal.SIGKILL)  # the driver is gone: nothing that this worker started may stay
        if verb == "call":
            wire.stop_requested = False
            commands.put((args[0], args[1]))
        elif verb == "stop":
            wire.stop_requested = True
        elif verb == "exit":
            commands.put(None)


def _answer(wire: SocketWire, payload: bytes) -> None:
    try:
        fn, args = parcel.loads(payload)
        value = _pack_value(fn(wire, *args))
    except SystemExit as leave:
        wire.flush()
        _flush_output()
        code = leave.code
        os._exit(code if isinstance(code, int) else int(code is not None))
    except BaseException as error:
        wire.send("raised", describe_error(error))
        del error
    else:
        wire.send_packed("returned", value)
    wire.flush()


def _pack_value(value: Any) -> bytes:
    try:
        return parcel.dumps(value)
    except Exception as error:
        raise TrainFunctionError(
            f"The function returned a {type(value).__qualname__} that cannot be pickled for the trip to the driver"
            f" ({type(error).__name__}: {error}). Return plain values, tensors or state dicts."
        ) from error


def describe_error(error: BaseException) -> tuple[str, str, str, bytes | None]:
    """What a Raised event needs. An exception that does not survive pickling goes home as text alone."""
    text = "".join(traceback.format_exception(error))
    error.__traceback__ = None
    try:
        packed = parcel.dumps(error)
        parcel.loads(packed)
    except Exception:
        packed = None
    return type(error).__qualname__, str(error), text, packed


def _leave_the_nursery(spec: dict[str, Any]) -> None:
    os.setsid()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != spec["nursery_pid"]:  # it died between the fork and the line above
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.enable()
    os.environ.clear()
    os.environ.update(spec["environ"])
    sys.path[:] = spec["sys_path"]
    sys.argv[:] = spec["argv"]
    with contextlib.suppress(OSError):
        os.chdir(spec["cwd"])
    random.seed()  # a fork repeats its parent's random numbers
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    _redirect_output(spec["log_path"])
    stacks = os.open(spec["stacks_path"], os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    faulthandler.enable(file=2)
    time.tzset()


class _LogFile(io.FileIO):
    """A log that never takes the training down: a full disk costs the line, not the run."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def _redirect_output(path: str) -> None:
    """Send this process's output, also that of C code and of its children, to the file."""
    _flush_output()
    try:
        fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    except OSError:
        return
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    for name, number in (("stdout", 1), ("stderr", 2)):
        raw = io.BufferedWriter(_LogFile(number, "w", closefd=False))
        stream = io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)
        setattr(sys, name, stream)


def _flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
