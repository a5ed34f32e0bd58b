"""Where the ranks of Horovod find each other: values under /scope/key, over HTTP, as its gloo store asks for them.

Each rank opens a connection for every question, and asks for a missing value again after 10 ms. One thread answers all
of them, so that whoever is slow or sends junk takes no thread away from the others. What may be held open is bounded
too. `horovod_requests` has the questions and the answers.
"""

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.backends.horovod_requests import MAX_HEAD_BYTES, REASONS, Bounds, Refused, Request, Values, parse_head
from paceline.backends.listening import listen_at
from paceline.errors import WorkerStartError

REQUEST_S = 10.0
"""So long a request may take to arrive, or its answer to be read."""
_PAUSE_S = 0.05


@dataclass
class _Connection:
    """One question on its way in, or the answer on its way out."""

    sock: socket.socket
    ends_at: float
    received: bytearray = field(default_factory=bytearray)
    request: Request | None = None
    to_send: memoryview | None = None
    is_refused: bool = False

    def receive(self, bounds: Bounds, answer: Callable[[str, str, bytes], tuple[int, bytes]]) -> bool:
        """Take what is there. Whether all of the question is, and its answer is ready to be sent."""
        self.received += self._take()
        try:
            if self.request is None and not self._read_head(bounds.max_value_bytes):
                return False
            assert self.request is not None
            method, path, num_bytes = self.request
            if len(self.received) < num_bytes:
                return False
            status, body = answer(method, path, bytes(self.received[:num_bytes]))
        except Refused as refused:
            status, body, self.is_refused = refused.status, b"", True
        # Horovod's client knows the header by this spelling alone.
        head = f"HTTP/1.1 {status} {REASONS[status]}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        self.to_send = memoryview(head.encode() + body)
        return True

    def _read_head(self, max_bytes: int) -> bool:
        head, end, rest = self.received.partition(b"\r\n\r\n")
        if len(head) > MAX_HEAD_BYTES:
            raise Refused(431)
        if not end:
            return False
        self.request, self.received = parse_head(bytes(head), max_bytes), rest
        return True

    def _take(self) -> bytes:
        if not (data := self.sock.recv(65536)):
            raise ConnectionAbortedError
        return data

    def send(self) -> bool:
        """Whether all of the answer is on its way."""
        assert self.to_send is not None
        self.to_send = self.to_send[self.sock.send(self.to_send) :]
        return not self.to_send

    @property
    def is_drained_only(self) -> bool:
        return self.is_refused and self.to_send is not None and not self.to_send

    def drain(self) -> None:
        """Who is refused may still be sending. If we closed before the end of that, the answer would be lost."""
        self._take()


class Rendezvous:
    """A server at this address, on a port that the system picks, until `close`."""

    def __init__(self, address: str, num_ranks: int) -> None:
        self._bounds = Bounds.of(num_ranks)
        self._values = Values(self._bounds.max_total_bytes)
        self._listener = _listen_at(address)
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._waker, self._wakened = socket.socketpair()
        self._connections: dict[socket.socket, _Connection] = {}  # the oldest first
        for sock in (self._listener, self._wakened):
            sock.setblocking(False)
            self._selector.register(sock, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="paceline-rendezvous", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Idempotent. Whoever still waits for an answer gets none."""
        with contextlib.suppress(OSError):
            self._waker.shutdown(socket.SHUT_RDWR)  # closed, it would still be open in processes that the user forked
        self._waker.close()
        self._thread.join()

    def _serve(self) -> None:
        try:
            while True:
                for key, _ in self._selector.select(self._patience()):
                    if key.fileobj is self._wakened:
                        return
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.data.sock in self._connections:  # else it has just been dropped
                        self._go_on_with(key.data)
                self._drop_late()
        finally:
            for sock in [*self._connections, self._listener, self._wakened]:
                sock.close()
            self._selector.close()

    def _patience(self) -> float | None:
        """Until the oldest connection has had its time. All have the same, so that those that follow end later."""
        oldest = next(iter(self._connections.values()), None)
        return None if oldest is None else max(0.0, oldest.ends_at - time.monotonic())

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:  # it has gone again
            return
        except OSError:  # this process can open no more files
            if not self._drop_oldest():
                time.sleep(_PAUSE_S)
            return
        if len(self._connections) >= self._bounds.max_connections:
            self._drop_oldest()  # not the new one: a rank is done in a moment, and who stays long is none
        sock.setblocking(False)
        connection = self._connections[sock] = _Connection(sock, time.monotonic() + REQUEST_S)
        self._selector.register(sock, selectors.EVENT_READ, connection)

    def _go_on_with(self, connection: _Connection) -> None:
        try:
            if connection.is_drained_only:
                connection.drain()
                return
            if connection.to_send is None:
                if not connection.receive(self._bounds, self._values.answer):
                    return
                self._selector.modify(connection.sock, selectors.EVENT_WRITE, connection)
            if connection.send():
                self._end(connection)
        except BlockingIOError:
            return
        except OSError:
            self._drop(connection)

    def _end(self, connection: _Connection) -> None:
        if not connection.is_refused:
            self._drop(connection)
            return
        connection.sock.shutdown(socket.SHUT_WR)
        self._selector.modify(connection.sock, selectors.EVENT_READ, connection)

    def _drop_late(self) -> None:
        now = time.monotonic()
        for connection in list(self._connections.values()):
            if connection.ends_at > now:
                return
            self._drop(connection)

    def _drop_oldest(self) -> bool:
        oldest = next(iter(self._connections.values()), None)
        if oldest is not None:
            self._drop(oldest)
        return oldest is not None

    def _drop(self, connection: _Connection) -> None:
        del self._connections[connection.sock]
        self._selector.unregister(connection.sock)
        connection.sock.close()


def _listen_at(address: str) -> socket.socket:
    if ":" in address:
        raise WorkerStartError(
            f"Rank 0 has the address {address}, and Horovod's ranks find each other by IPv4 only. On a Ray cluster, "
            "start each node with such an address: ray start --node-ip-address=..."
        )
    return listen_at(address, backlog=512)
