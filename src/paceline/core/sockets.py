"""Connections among ranks: who may come, what happens when the other machine is gone, and when this process forks."""

import hmac
import os
import secrets
import socket
import struct
import weakref

NONCE_BYTES = 32
HELLO = struct.Struct("<32sIIII")
"""A proof of the secret, then rank, rank on the machine, machine and pid."""
WELCOME_BYTES = 32

_KEEPALIVE = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 30_000))
"""A machine that is gone says nothing: it is asked, and after half a minute without an answer the connection ends."""


def prepare(sock: socket.socket) -> None:
    """For a new connection. From now on it does not block, and is not a fork's."""
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    guard(sock)


_guarded: weakref.WeakSet[socket.socket] = weakref.WeakSet()
"""Of the process, as a fork is: loaders fork, and a connection ends only when all who hold it are gone."""
_is_watching = False


def guard(sock: socket.socket) -> None:
    """Close it in processes that this one forks."""
    global _is_watching
    if not _is_watching:
        _is_watching = True
        os.register_at_fork(after_in_child=_close_in_child)
    _guarded.add(sock)


def _close_in_child() -> None:
    for sock in list(_guarded):
        sock.close()


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def hello(token: str, nonce: bytes, rank: int, local_rank: int, machine: int, pid: int) -> bytes:
    """What a rank answers: it knows the secret, which is not told."""
    numbers = HELLO.pack(b"", rank, local_rank, machine, pid)[32:]
    return _proof(token, b"hello" + nonce + numbers) + numbers


def read_hello(token: str, nonce: bytes, data: bytes) -> tuple[int, int, int, int] | None:
    """(rank, rank on the machine, machine, pid); None for a stranger."""
    if not hmac.compare_digest(data[:32], _proof(token, b"hello" + nonce + data[32:])):
        return None
    _, rank, local_rank, machine, pid = HELLO.unpack(data)
    return rank, local_rank, machine, pid


def welcome(token: str, said: bytes) -> bytes:
    """By which the rank knows that it has come to the right one: what it hears from there, it unpickles."""
    return _proof(token, b"welcome" + said)


def _proof(token: str, message: bytes) -> bytes:
    return hmac.digest(token.encode(), message, "sha256")
