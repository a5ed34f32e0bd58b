"""Hidden directories that belong to one living process, and are cleared away by the next writer once it is
dead.
"""

import fcntl
import os
import secrets
import shutil
import stat
import tempfile
from pathlib import Path

_PREFIX = ".paceline-staging-"
_LOCK = "lock"


class Workspace:
    """A fresh hidden directory in `parent`. Its owner holds a lock on a file in it, which the kernel drops
    when the owner
    dies, however it dies: so a lock that can be taken means a directory that can go. (A process id in the
    name would say less: another host on the same file system counts its processes anew.)
    """

    def __init__(self, parent: Path):
        self.path, self._lock_fd = _create(parent)
        self._owner_pid = os.getpid()

    def close(self) -> None:
        """Removes the directory with everything left in it. Not in a fork of its owner, which still needs it."""
        if self._lock_fd is not None and self._owner_pid == os.getpid():
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock_fd)
            self._lock_fd = None

    def __enter__(self) -> "Workspace":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def temporary_workspace() -> Workspace:
    """One where the system keeps its temporary files, for storage that is not on a disk of ours."""
    parent = Path(tempfile.gettempdir())
    sweep(parent)
    return Workspace(parent)


def sweep(parent: Path) -> None:
    """Removes the workspaces in `parent` whose owners are dead. Leaves alone what it cannot be sure about."""
    for path in parent.glob(f"{_PREFIX}*"):
        try:
            found = path.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
                _remove_if_dead(path)
        except OSError:
            continue  # gone meanwhile, or on a file system without locks


def _create(parent: Path) -> tuple[Path, int | None]:
    while True:
        path = parent / f"{_PREFIX}{secrets.token_hex(6)}"
        path.mkdir(mode=0o700)
        try:
            fd = _open_lock(path)
        except FileNotFoundError:
            continue  # a sweeper came between the two lines above
        except OSError:
            shutil.rmtree(path, ignore_errors=True)
            raise
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
        except OSError:
            return path, fd  # no locks on this file system: then no sweeper can take it either
        if (path / _LOCK).exists():
            return path, fd
        os.close(fd)


def _remove_if_dead(path: Path) -> None:
    fd = _open_lock(path)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(fd)


def _open_lock(path: Path) -> int:
    return os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
