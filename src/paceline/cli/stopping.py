"""The driver of a run, stopped: only if it is sure that it is that.

A run folder is data, and may name any process. So more than the pid has to fit: this machine and boot, when the process
started, whose it is, and that it has this very folder's `driver.lock` open. The signal goes through a pidfd, which
cannot come to mean another process.
"""

import os
import signal
from contextlib import suppress

from paceline.errors import TrainerStateError
from paceline.runs.load import Run
from paceline.runs.status import find_driver


class DriverProcess:
    """Of a run that goes on. TrainerStateError says why it cannot be stopped from here; None from `find` if the run has
    ended by now."""

    def __init__(self, pid: int, pidfd: int):
        self.pid = pid
        self._pidfd = pidfd

    @classmethod
    def find(cls, run: Run) -> "DriverProcess | None":
        status = run.status
        if status.state.is_final:
            return None
        if status.pid is None or status.pid_started is None or find_driver(status) != "here":
            where = f"process {status.pid} on {status.host}" if status.pid else "a process that it does not name"
            raise TrainerStateError(
                f"{run.name} is driven by {where}, which cannot be seen from here. Stop it there: `paceline xp stop`."
            )
        try:
            pidfd = os.pidfd_open(status.pid)
        except OSError:
            return None  # it has just ended
        if find_driver(status) != "here" or not _drives(status.pid, run):
            os.close(pidfd)
            if run.status.state.is_final:
                return None
            raise TrainerStateError(
                f"{run.path}/status.json names process {status.pid}, but that does not drive this run: it is another "
                "user's, or has not opened the folder. Nothing was sent to it."
            )
        return cls(status.pid, pidfd)

    def send(self, number: signal.Signals) -> None:
        """Nothing happens if it has ended."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def close(self) -> None:
        os.close(self._pidfd)


def _drives(pid: int, run: Run) -> bool:
    """Whether it is ours, and has the lock of this folder open."""
    try:
        if os.stat(f"/proc/{pid}").st_uid != os.geteuid():
            return False
        lock = os.lstat(run.path / "driver.lock")
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                one = os.stat(f"/proc/{pid}/fd/{fd}")
                if (one.st_dev, one.st_ino) == (lock.st_dev, lock.st_ino):
                    return True
    except OSError:
        pass
    return False
