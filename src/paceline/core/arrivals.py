"""Who has come to rank 0 and has not said who it is yet.

Anybody on the machine can connect, and in the network too if there are several machines. They get a challenge, a few
seconds to answer it, and there is room for some of them only; nothing that they say is read further than that.
"""

import contextlib
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from paceline.core import sockets

ANSWER_S = 20.0
MOST_WAITING = 64


class Hello(NamedTuple):
    """Of one who knows the secret."""

    rank: int
    local_rank: int
    machine: int
    pid: int


@dataclass(eq=False)
class Arrival:
    """A connection of who knows whom."""

    sock: socket.socket
    nonce: bytes
    deadline: float
    said: bytes = b""


class Arrivals:
    """For one thread, whose selector it uses: there, the key of an arrival has it as its data."""

    def __init__(
        self,
        server: socket.socket,
        selector: selectors.BaseSelector,
        token: str,
        most_waiting: int = MOST_WAITING,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._server, self._selector, self._token = server, selector, token
        self._most_waiting, self._clock = most_waiting, clock
        self._waiting: list[Arrival] = []
        self._is_open = True
        selector.register(server, selectors.EVENT_READ, None)

    def accept(self) -> None:
        """Somebody is at the door. Too many of them, and the one that has waited longest has to go: a rank answers at
        once, and comes again if it was one."""
        with contextlib.suppress(OSError):
            sock, _ = self._server.accept()
            sockets.prepare(sock)
            arrival = Arrival(sock, sockets.new_nonce(), self._clock() + ANSWER_S)
            self._waiting.append(arrival)
            self._selector.register(sock, selectors.EVENT_READ, arrival)
            if len(self._waiting) > self._most_waiting:
                self.dismiss(self._waiting[0])
            sock.send(arrival.nonce)  # a new connection takes so much at once

    def hear(self, arrival: Arrival) -> Hello | None:
        """Who it is, once it has proven that; a stranger is dismissed. Whoever is known is the caller's from now on, or
        to be dismissed by it."""
        if arrival not in self._waiting:  # dismissed, since the selector has seen it
            return None
        try:
            data = arrival.sock.recv(sockets.HELLO.size - len(arrival.said))
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        arrival.said += data
        if data and len(arrival.said) < sockets.HELLO.size:
            return None
        known = sockets.read_hello(self._token, arrival.nonce, arrival.said) if data else None
        if known is None:
            self.dismiss(arrival)
            return None
        return Hello(*known)

    def admit(self, arrival: Arrival) -> socket.socket:
        """It is somebody: the connection is the caller's, in the selector too."""
        self._forget(arrival)
        return arrival.sock

    def dismiss(self, arrival: Arrival) -> None:
        """Without a word."""
        self._forget(arrival)
        arrival.sock.close()

    def dismiss_late(self) -> None:
        """Those who have not answered in time."""
        while self._waiting and self._clock() >= self._waiting[0].deadline:
            self.dismiss(self._waiting[0])

    def close(self) -> None:
        """All who were expected are there: nobody else comes in. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._selector.unregister(self._server)
            self._server.close()
        while self._waiting:
            self.dismiss(self._waiting[0])

    def _forget(self, arrival: Arrival) -> None:
        self._waiting.remove(arrival)
        self._selector.unregister(arrival.sock)
