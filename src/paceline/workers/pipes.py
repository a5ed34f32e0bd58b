"""Pipes between the driver and its workers."""

import fcntl
import os
from contextlib import ExitStack, suppress


def new_pipe(num_bytes: int = 1 << 18) -> tuple[int, int]:
    """Where it is read, and where it is written. Users other than root have 64 MiB for all pipes together."""
    reads, writes = os.pipe2(os.O_CLOEXEC)
    with suppress(OSError):  # a smaller one only makes who writes wait sooner
        fcntl.fcntl(writes, fcntl.F_SETPIPE_SZ, num_bytes)
    return reads, writes


def kept(files: ExitStack, fd: int) -> int:
    files.callback(os.close, fd)
    return fd
