"""The connections of gloo inside a process. jax keeps them as long as any array lives; who leaves a group has to end
them all the same, since others may wait for it in a collective.
"""

import os
import socket
from collections.abc import Iterator, Set
from contextlib import contextmanager, suppress

Address = tuple[str, int]


def listening() -> set[Address]:
    """Where this process listens."""
    found = set()
    for fd in _open_files():
        with suppress(OSError), _tcp(fd) as sock:
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.add(_end(sock.getsockname()))
    return found


def hang_up(links: Set[Address]) -> int:
    """End every connection that somebody has made to one of these addresses, on whichever side of it this process is.
    The files stay open, since whoever owns them will close them. Returns how many there were."""
    num_ended = 0
    for fd in _open_files():
        with suppress(OSError), _tcp(fd) as sock:
            if {_end(sock.getsockname()), _end(sock.getpeername())} & links:
                sock.shutdown(socket.SHUT_RDWR)
                num_ended += 1
    return num_ended


def _open_files() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/fd")]


@contextmanager
def _tcp(fd: int) -> Iterator[socket.socket]:
    """The socket behind a file of this process, through a descriptor of its own. OSError for anything else."""
    copy = os.dup(fd)
    try:
        found = socket.socket(fileno=copy)
    except OSError:  # it is no socket, and then the copy is still ours to close
        os.close(copy)
        raise
    with found as sock:
        if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
            raise OSError("not a TCP socket")
        yield sock


def _end(name: tuple[str, int] | tuple[str, int, int, int]) -> Address:
    return name[0].removeprefix("::ffff:"), name[1]
