"""One driver a run: a lock that the kernel frees when its process ends, however it ends."""

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from paceline.errors import TrainerStateError

_FILE = "driver.lock"


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
