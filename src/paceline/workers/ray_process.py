"""Whether the process of a Ray actor lives, of one on this machine, without asking Ray.

Ray knows the end of a worker by its sockets. Processes that the worker has forked have them too, a pool of the user's,
say: as long as one of these lives, the worker lives for Ray, and whoever waits for its answer waits.
"""

import os
from pathlib import Path

Birth = tuple[str, int, str]
"""A machine since it was started, a process on it, and when that began: nobody else's, in containers neither."""

_BOOT_FILE = Path("/proc/sys/kernel/random/boot_id")


def own_birth() -> Birth:
    return _machine(), os.getpid(), _beginning_of(os.getpid()) or ""


class ProcessWatch:
    """Of one process, by what it told of itself."""

    def __init__(self, birth: Birth):
        self._machine, self._pid, self._beginning = birth
        self._is_seen, self._num_missed = False, 0

    def look(self) -> bool:
        """True if it was here, and is missed for the second time: what Ray has to tell of it comes first."""
        if not self._is_seen and self._machine != _machine():
            return False
        if _beginning_of(self._pid) == self._beginning:
            self._is_seen = True
        elif self._is_seen:
            self._num_missed += 1
        return self._num_missed > 1


def _machine() -> str:
    try:
        return _BOOT_FILE.read_text().strip()
    except OSError:
        return ""


def _beginning_of(pid: int) -> str | None:
    """In ticks of the kernel. None if it has ended, also while nobody has asked for its exit code."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else fields[19]
