"""The other ranks' end of the connection to rank 0, and a session's wire over it."""

import contextlib
import logging
import os
import pickle
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from paceline.core import sockets
from paceline.core.meeting import Address
from paceline.errors import PacelineError, WorkerError, WorkersLostError, WorkerStartError
from paceline.rank_session import Task
from paceline.workers import parcel
from paceline.workers.base import Place
from paceline.workers.framing import FrameReader, UnreadError, send_patiently
from paceline.workers.outcome import Error
from paceline.workers.questions import Questions

logger = logging.getLogger(__name__)

_RETRY_S = 0.05
_MARGIN_S = 20.0
"""Rank 0 knows better who has not come: it is given the time to say so."""


class Link:
    """See `Channel`. A thread reads what comes. Once rank 0 is gone, or says that the run has failed, every call raises
    that."""

    def __init__(self, find: Callable[[float], Address], place: Place, timeout_s: float):
        """Blocks until all ranks are connected. `find` says where rank 0 is, within so many seconds."""
        self.place, self._timeout_s, self._owner_pid = place, timeout_s, os.getpid()
        self.stopping = False
        self.error: PacelineError | None = None
        self.wished: str | None = None
        """What a signal was for that has ended the run, on whichever rank it came."""
        self.questions = Questions()
        self.wire = LinkWire(self)
        self._ready, self._begin, self._over = Future[None](), Future[bytes](), Future[None]()
        self._mine: Future[Any] | None = None
        self._serials: dict[str, int] = {}
        self._sending = threading.RLock()
        self._is_sending, self._held = False, deque[tuple[Any, ...]]()
        self._has_ended = self._is_closing = False
        self._sock = _connect(find, place, timeout_s)
        self._thread = threading.Thread(target=self._listen, name="paceline-link", daemon=True)
        self._thread.start()
        try:
            self._wait(self._ready, "Not all ranks have come")
        except BaseException:
            self.close()
            raise

    def exchange(self, scope: str, op: str, payload: bytes) -> Any:
        serial = self._serials[scope] = self._serials.get(scope, 0) + 1
        mine = self._mine = Future[Any]()
        self.send(("collective", scope, serial, op, payload))
        return self._wait(mine, f"{op}(): rank 0 has not answered")

    def await_begin(self) -> Task:
        """The run as rank 0 begins it."""
        task: Task = parcel.loads(self._wait(self._begin, "Rank 0 has not begun the run"))
        return task

    def await_over(self) -> None:
        """Until rank 0 has closed the run. Raises why it has failed."""
        try:
            self._over.result(self._timeout_s)
        except TimeoutError:
            logger.warning("Rank 0 has not ended the run within %g s of this rank: going on.", self._timeout_s)

    def end(self, error: Error | None, is_stop: bool = False) -> None:
        """This rank has left the block. Once; nothing happens later, nor in a fork."""
        if self._has_ended or os.getpid() != self._owner_pid:
            return
        self._has_ended = True
        with contextlib.suppress(OSError, PacelineError):
            self._send(("ended", error, is_stop))

    def request_stop(self, kind: str) -> None:
        """Somebody wants an end, of this `Wish.kind`: rank 0 tells all. Not for signal handlers."""
        with contextlib.suppress(PacelineError):
            self.send(("stopping", kind))

    def send(self, message: tuple[Any, ...]) -> None:
        """Waits for other threads, and while the connection is full. A signal handler that has interrupted it in this
        thread leaves its message to it."""
        if self.error is not None:
            raise self.error
        self._send(message)

    def _send(self, message: tuple[Any, ...]) -> None:
        with self._sending:
            self._held.append(message)
            if self._is_sending:
                return
            self._is_sending = True
            try:
                while self._held:
                    send_patiently(self._sock, self._held.popleft(), self._timeout_s)
            except (OSError, UnreadError) as error:
                self._lose(f"it cannot be reached ({error})")
                raise (self.error or WorkerError("The connection to rank 0 is closed.")) from error
            finally:
                self._is_sending = False

    def close(self) -> None:
        if self._is_closing or os.getpid() != self._owner_pid:
            return
        self._is_closing = True
        with contextlib.suppress(OSError, PacelineError):
            self._send(("bye",))
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(_MARGIN_S)
        self._sock.close()

    def _wait(self, future: "Future[Any]", what: str) -> Any:
        try:
            return future.result(self._timeout_s + _MARGIN_S)
        except TimeoutError:
            raise WorkerError(f"{what} within {self._timeout_s:g} s.") from None

    def _listen(self) -> None:
        reader, poller = FrameReader(self._sock.fileno()), select.poll()
        poller.register(self._sock, select.POLLIN)
        while not reader.closed:
            poller.poll()
            try:
                for body in reader.bodies():
                    self._handle(pickle.loads(body))
            except Exception as error:
                self._lose(f"it has sent something that makes no sense ({type(error).__name__}: {error})")
                break
        self._lose("its process has ended, or cannot be reached any more")
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def _handle(self, message: tuple[Any, ...]) -> None:
        match message:
            case ("collective", scope, serial, value):
                if serial == self._serials.get(scope):  # else of one that this rank has given up
                    _settle(self._mine, value)
            case ("answer", number, value):
                self.questions.answer(number, value)
            case ("stop",):
                self.stopping = True
            case ("ready",):
                _settle(self._ready, None)
            case ("begin", packed):
                _settle(self._begin, packed)
            case ("failed", error):
                self._fail(error)
            case ("over", error, wished):
                self.wished = wished
                _settle(self._over, error)
                if error is not None:
                    self._fail(error)

    def _lose(self, reason: str) -> None:
        """Rank 0 is gone; which is fine once the run is over."""
        if not self._is_closing:
            self._fail(
                WorkersLostError(f"Rank 0, through which all ranks are connected, is gone: {reason}.")
                if not self._over.done()
                else WorkerError("The run is over: rank 0 has left.")
            )

    def _fail(self, error: PacelineError) -> None:
        self.error = self.error or error
        self.stopping = True
        self.questions.abandon(self.error)
        for future in (self._ready, self._begin, self._over, self._mine):
            _settle(future, self.error)


class LinkWire:
    """See `Wire`."""

    def __init__(self, link: Link):
        self.place, self._link = link.place, link
        self.address = "127.0.0.1"
        self.shared: dict[str, Any] = {}
        self.leaving = contextlib.ExitStack()
        self.is_spent = False

    @property
    def stopping(self) -> bool:
        return self._link.stopping

    def report(self, packed: bytes) -> None:
        self._link.send(("report", packed))

    def send(self, kind: str, value: Any) -> None:
        self._link.send(("sent", kind, value))

    def ask(self, topic: str, value: Any, timeout_s: float | None = None) -> Any:
        link = self._link
        bound_s = link._timeout_s if timeout_s is None else timeout_s
        return link.questions.ask(lambda number: link.send(("asked", number, topic, value)), bound_s)

    def flush(self) -> None:
        """Nothing to do: what was sent outlives this process."""


def _settle(future: "Future[Any] | None", value: Any) -> None:
    with contextlib.suppress(Exception):  # it is settled already
        if future is None:
            return
        if isinstance(value, BaseException):
            future.set_exception(value)
        else:
            future.set_result(value)


def _connect(find: Callable[[float], Address], place: Place, timeout_s: float) -> socket.socket:
    """To rank 0, as soon as it listens. Refused, by one who listens there and does not know us, is tried again too."""
    deadline = time.monotonic() + timeout_s
    while True:
        address = find(max(0.0, deadline - time.monotonic()))
        try:
            return _meet(address, place, max(1.0, deadline - time.monotonic()))
        except (OSError, EOFError) as error:
            if time.monotonic() >= deadline:
                raise WorkerStartError(
                    f"Rank {place.world_rank} cannot reach rank 0 at {address.host}, port {address.port}: {error}. "
                    "Give chief_ip, an address of rank 0's machine that the others reach."
                ) from error
        time.sleep(_RETRY_S)


def _meet(address: Address, place: Place, timeout_s: float) -> socket.socket:
    sock = socket.create_connection((address.host, address.port), timeout=timeout_s)
    try:
        nonce = _receive(sock, sockets.NONCE_BYTES)
        said = sockets.hello(address.token, nonce, place.world_rank, place.local_rank, place.node_rank, os.getpid())
        sock.sendall(said)
        if _receive(sock, sockets.WELCOME_BYTES) != sockets.welcome(address.token, said):
            raise ConnectionRefusedError("another program listens there")
        sockets.prepare(sock)
    except BaseException:
        sock.close()
        raise
    return sock


def _receive(sock: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        more = sock.recv(num_bytes - len(data))
        if not more:
            raise EOFError("it does not know this rank, or has it already")
        data += more
    return data
