"""Whole messages over a byte stream: eight bytes of length, then the body. Both ends are ours."""

import os
import pickle
import select
import socket
import struct
import time
from contextlib import suppress
from typing import Any

_LENGTH = struct.Struct("<Q")
_CHUNK_BYTES = 1 << 20
_FIRST_BYTES = 1 << 16
"""What is read at first: most of the time there is little, and memory for a large piece costs more than the reading."""
_MOST_CHUNKS = 64


def framed(body: bytes) -> bytes:
    return _LENGTH.pack(len(body)) + body


def send_message(sock: socket.socket, message: Any) -> None:
    sock.sendall(framed(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)))


def send_patiently(sock: socket.socket, message: Any, timeout_s: float) -> None:
    """The same over a socket that does not block. TimeoutError if the other end does not read: the stream is then torn,
    and so the connection is closed."""
    try:
        write_patiently(sock.fileno(), pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL), timeout_s)
    except TimeoutError:
        sock.shutdown(socket.SHUT_RDWR)
        raise


def write_patiently(fd: int, body: bytes, timeout_s: float) -> None:
    """Into what does not block. TimeoutError if the other end does not read: the stream is then torn."""
    data = framed(body)
    try:
        written = os.write(fd, data)
    except BlockingIOError:
        written = 0
    if written < len(data):
        _write_rest(fd, memoryview(data)[written:], timeout_s)


def _write_rest(fd: int, data: memoryview, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    poller = select.poll()
    poller.register(fd, select.POLLOUT)
    while data:
        if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TimeoutError("the other end does not read")
        with suppress(BlockingIOError):
            data = data[os.write(fd, data) :]


def write_frame(fd: int, body: bytes) -> None:
    """Into a pipe that blocks while it is full."""
    data = framed(body)
    written = os.write(fd, data)
    while written < len(data):
        written += os.write(fd, memoryview(data)[written:])


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


class FrameReader:
    """The bodies that have arrived whole at a non-blocking file descriptor. A torn one at the end never shows."""

    def __init__(self, fd: int):
        self._fd = fd
        self._data = bytearray()
        self.closed = False

    def bodies(self) -> list[bytearray]:
        self._fill()
        found, start, end = [], 0, len(self._data)
        while end - start >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._data, start)
            if end - start - _LENGTH.size < size:
                break
            start += _LENGTH.size + size
            found.append(self._data[start - size : start])
        if start:
            del self._data[:start]
        return found

    def _fill(self) -> None:
        """Take what is there; sets `closed` at the end of the stream."""
        for number in range(_MOST_CHUNKS):  # a flood must not keep the caller here for ever
            size = _CHUNK_BYTES if number > 1 else _FIRST_BYTES
            try:
                chunk = os.read(self._fd, size)
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionError:
                chunk = b""
            if not chunk:
                self.closed = True
                return
            self._data += chunk
            if len(chunk) < size:  # there was no more: the end of the stream shows when it is read next
                return
