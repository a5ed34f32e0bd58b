"""Locks that the kernel frees when their process ends, however it ends: one driver a run, one process in a folder."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline.errors import TrainerStateError

_FILE = "driver.lock"
_MOST_WAIT_S = 5.0
_POLL_S = 0.02


class DriverLock:
    """Taken when made. TrainerStateError if another process, or another object of this one, holds it."""

    def __init__(self, run_dir: Path):
        self._owner_pid = os.getpid()
        self._fd = os.open(run_dir / _FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            raise TrainerStateError(
                f"{run_dir} is being written by another process. Wait until it has ended, or stop it, and try again."
            ) from None
        except OSError:
            pass  # a file system without locks: then only the status can tell

    def release(self) -> None:
        """Also if a child of this process has inherited it: to close it is not enough then. In such a child, it stays:
        the lock is its parent's."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            if self._owner_pid == os.getpid():
                with suppress(OSError):
                    fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Inside, no other process is. Where there are no locks, or one holds it for long, it goes on without."""
    fd, deadline = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), time.monotonic() + _MOST_WAIT_S
    try:
        with suppress(OSError):
            while time.monotonic() < deadline:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(_POLL_S)
        yield
    finally:
        os.close(fd)
