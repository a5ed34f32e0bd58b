"""Pipes between the driver and its workers."""

import fcntl
import os
import select
import time
from contextlib import ExitStack, suppress

AWAKE_S = 0.0005
"""How long who waits for an answer stays awake: as long as the other side takes that has little to do for it."""


def new_pipe(num_bytes: int = 1 << 18) -> tuple[int, int]:
    """Where it is read, and where it is written. Users other than root have 64 MiB for all pipes together."""
    reads, writes = os.pipe2(os.O_CLOEXEC)
    with suppress(OSError):  # a smaller one only makes who writes wait sooner
        fcntl.fcntl(writes, fcntl.F_SETPIPE_SZ, num_bytes)
    return reads, writes


def kept(files: ExitStack, fd: int) -> int:
    files.callback(os.close, fd)
    return fd


def stay_awake(poller: "select.poll | select.epoll", since: float) -> None:
    """Until there is something to read, but not for long after that moment of `time.perf_counter`: to wake somebody who
    sleeps takes longer than most answers need, and may move him to another core, away from all that he had in its
    cache. The core is for whoever else wants it meanwhile, the other side above all."""
    deadline = since + AWAKE_S
    while time.perf_counter() < deadline and not poller.poll(0):
        os.sched_yield()
