"""Whole messages over a stream socket: eight bytes of length, then a pickle. Both ends are ours."""

import pickle
import socket
import struct
from collections.abc import Iterator
from typing import Any

_LENGTH = struct.Struct("<Q")
_CHUNK_BYTES = 1 << 20
_MOST_CHUNKS = 64


def send_message(sock: socket.socket, message: Any) -> None:
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    head = _LENGTH.pack(len(body))
    if len(body) < _CHUNK_BYTES:
        sock.sendall(head + body)
    else:
        sock.sendall(head)
        sock.sendall(body)


def recv_message(sock: socket.socket) -> Any:
    """Blocking; raises EOFError when the other end is gone."""
    head = _recv_exactly(sock, _LENGTH.size)
    return pickle.loads(_recv_exactly(sock, _LENGTH.unpack(head)[0]))


def _recv_exactly(sock: socket.socket, num_bytes: int) -> bytearray:
    data = bytearray(num_bytes)
    view = memoryview(data)
    while view:
        received = sock.recv_into(view)
        if not received:
            raise EOFError("the other end closed the connection")
        view = view[received:]
    return data


class MessageReader:
    """Messages from a non-blocking socket, as far as they have arrived."""

    def __init__(self, sock: socket.socket):
        self._sock = sock
        self._data = bytearray()
        self.closed = False

    def messages(self) -> Iterator[Any]:
        self._fill()
        start, end = 0, len(self._data)
        try:
            while end - start >= _LENGTH.size:
                (size,) = _LENGTH.unpack_from(self._data, start)
                if end - start - _LENGTH.size < size:
                    break
                body = self._data[start + _LENGTH.size : start + _LENGTH.size + size]
                start += _LENGTH.size + size
                yield pickle.loads(body)
        finally:
            del self._data[:start]

    def _fill(self) -> None:
        """Take what is there; sets `closed` at the end of the stream."""
        for _ in range(_MOST_CHUNKS):  # a flood must not keep the caller here for ever
            try:
                chunk = self._sock.recv(_CHUNK_BYTES)
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionError:
                chunk = b""
            if not chunk:
                self.closed = True
                return
            self._data += chunk
