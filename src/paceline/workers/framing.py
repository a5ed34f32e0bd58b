"""Whole messages over a byte stream: eight bytes of length, then the body. Both ends are ours."""

import errno
import os
import pickle
import select
import socket
import struct
from contextlib import suppress
from typing import Any

from paceline.workers import parcel

_LENGTH = struct.Struct("<Q")
_CHUNK_BYTES = 1 << 20
_FIRST_BYTES = 1 << 16
"""What is read at first: most of the time there is little, and memory for a large piece costs more than the reading."""
_MOST_CHUNKS = 64

_GONE = {errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.EBADF}


class UnreadError(Exception):
    """The other end reads nothing: the stream is torn. No TimeoutError, which a signal handler of the user's raises."""


def is_hang_up(error: OSError) -> bool:
    """Whether it is about the other end, or this one, being closed, and no user's signal handler has raised it."""
    return error.errno in _GONE


def framed(body: bytes) -> bytes:
    return _LENGTH.pack(len(body)) + body


def write_patiently(fd: int, body: bytes, timeout_s: float) -> None:
    """Into what does not block. UnreadError if the other end reads nothing for so long."""
    data = framed(body)
    try:
        written = os.write(fd, data)
    except BlockingIOError:
        written = 0
    if written < len(data):
        _write_rest(fd, memoryview(data)[written:], timeout_s)


def _write_rest(fd: int, data: memoryview, timeout_s: float) -> None:
    poller = select.poll()
    poller.register(fd, select.POLLOUT)
    while data:
        if not poller.poll(timeout_s * 1000):
            raise UnreadError(f"the other end reads nothing for {timeout_s:g} s")
        with suppress(BlockingIOError):
            data = data[os.write(fd, data) :]


def send_patiently(sock: socket.socket, message: Any, timeout_s: float) -> None:
    """The same over a socket, which is closed if the other end does not read."""
    try:
        write_patiently(sock.fileno(), parcel.quick_dumps(message), timeout_s)
    except UnreadError:
        sock.shutdown(socket.SHUT_RDWR)
        raise


def write_frame(fd: int, body: bytes) -> None:
    """Into a pipe that blocks while it is full."""
    data = framed(body)
    written = os.write(fd, data)
    while written < len(data):
        written += os.write(fd, memoryview(data)[written:])


def read_frame(fd: int) -> memoryview:
    """From a pipe that blocks while it is empty, into which no other is written before this one is read. EOFError if
    the other end is gone."""
    data: bytes | bytearray = os.read(fd, _FIRST_BYTES)
    while missing := _num_missing(data):
        chunk = os.read(fd, min(missing, _CHUNK_BYTES))
        if not chunk:
            raise EOFError("the other end closed the connection")
        data = data if isinstance(data, bytearray) else bytearray(data)
        data += chunk
    return memoryview(data)[_LENGTH.size :]


def _num_missing(data: bytes | bytearray) -> int:
    """To what is known to belong to the frame that begins there."""
    if len(data) < _LENGTH.size:
        return _LENGTH.size - len(data)
    return int(_LENGTH.size + _LENGTH.unpack_from(data)[0] - len(data))


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
    """The bodies that have arrived whole at a non-blocking file descriptor. A torn one at the end never shows; and none
    after an exception from a signal handler, which may have come between the reading and the keeping of a piece."""

    def __init__(self, fd: int):
        self._fd = fd
        self._data = bytearray()
        self._is_reading = False
        self.closed = False

    def bodies(self) -> list[bytes | bytearray]:
        if self._is_reading:
            self.closed = True
            return []
        self._is_reading = True
        found = self._bodies()
        self._is_reading = False
        return found

    def _bodies(self) -> list[bytes | bytearray]:
        if not self._data:  # nearly always, and then one frame is all there is
            chunk = self._read(_FIRST_BYTES)
            is_all = len(chunk) < _FIRST_BYTES
            if is_all and (not chunk or _num_missing(chunk) == 0):
                return [chunk[_LENGTH.size :]] if chunk else []
            self._data += chunk
            if not is_all:
                self._fill()
        else:
            self._fill()
        found: list[bytes | bytearray] = []
        start, end = 0, len(self._data)
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
        """Take what is there."""
        for number in range(_MOST_CHUNKS):  # a flood must not keep the caller here for ever
            size = _CHUNK_BYTES if number > 1 else _FIRST_BYTES
            chunk = self._read(size)
            self._data += chunk
            if len(chunk) < size:  # there was no more: the end of the stream shows when it is read next
                return

    def _read(self, size: int) -> bytes:
        """Nothing if there is nothing; sets `closed` at the end of the stream."""
        try:
            chunk = os.read(self._fd, size)
        except (BlockingIOError, InterruptedError):
            return b""
        except ConnectionError:
            chunk = b""
        if not chunk:
            self.closed = True
        return chunk
