"""The connection of another rank, at rank 0's end."""

import socket
from collections import deque

from paceline.core.arrivals import Hello
from paceline.workers.framing import FrameReader, framed


class Peer:
    """What the rank should get is kept until it reads."""

    def __init__(self, sock: socket.socket, known: Hello):
        self.sock, self.known = sock, known
        self.reader = FrameReader(sock.fileno())
        self.has_left = False
        """Whether it has said so: then it is not lost when the connection ends."""
        self._outbox = deque[memoryview]()

    @property
    def has_more(self) -> bool:
        """Whether something is left that it should get."""
        return bool(self._outbox)

    def put(self, body: bytes, *, is_framed: bool = True) -> None:
        self._outbox.append(memoryview(framed(body) if is_framed else body))

    def push(self) -> None:
        """As much as the connection takes. That it is broken, who reads from it notices."""
        try:
            while self._outbox:
                left = self._outbox[0][self.sock.send(self._outbox[0]) :]
                if left:
                    self._outbox[0] = left
                else:
                    self._outbox.popleft()
        except BlockingIOError:
            pass
        except OSError:
            self._outbox.clear()

    def close(self) -> None:
        self.sock.close()
        self._outbox.clear()
