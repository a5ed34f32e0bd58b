"""Modules of the user's own that were edited after a process had imported them.

What is installed is not looked at: only source files outside of Python's own folders.
"""

import contextlib
import os
import sys
from collections.abc import Container, Iterable

from paceline.workers.installed import is_installed


class UserFiles:
    """In a worker, or the nursery: the files of the user's modules that this process has imported."""

    def __init__(self) -> None:
        self._num_modules = 0
        self._told: set[str] = set()
        self._modified: dict[str, int] = {}
        self._remembered: set[str] = set()
        """Modules that the nursery has looked at. A worker that touches all of them, some thousands, copies their
        pages: that takes longer than to join a group."""

    def news(self) -> list[str]:
        """Those that were not told yet. Cheap when nothing was imported."""
        if len(sys.modules) == self._num_modules:
            return []
        self._num_modules = len(sys.modules)
        found = {*self._modified, *_user_modules(self._remembered).values()}
        news = sorted(found - self._told)
        self._told.update(news)
        return news

    def remember(self) -> None:
        """In the nursery, when its imports are done: how these files are now."""
        self._modified = {file: modified for file in _user_modules().values() if (modified := _modified(file))}
        self._remembered = set(sys.modules)

    def forget_edited(self) -> None:
        """In a worker just forked: if one of them is different now, import all of them again when they are needed."""
        if any(_modified(file) != modified for file, modified in self._modified.items()):
            for name in _user_modules():
                del sys.modules[name]
                self._remembered.discard(name)
            self._modified.clear()


user_files = UserFiles()
"""Of this process, as `sys.modules` is."""


class Edits:
    """On the driver: what its workers have imported, and whether that has changed since."""

    def __init__(self) -> None:
        self._modified: dict[str, int] = {}

    def learn(self, files: Iterable[str], begin_ns: int) -> None:
        """A worker has imported them after that time. One that was written later may be another one already."""
        for file in files:
            modified = _modified(file)
            if modified is not None and file not in self._modified:  # else the worker's machine has it, and not ours
                self._modified[file] = modified if modified < begin_ns else 0

    def edited(self) -> list[str]:
        return sorted(file for file, modified in self._modified.items() if _modified(file) != modified)

    def clear(self) -> None:
        self._modified.clear()


def _user_modules(but: Container[str] = ()) -> dict[str, str]:
    """The files of this process's modules that are the user's own, by the name of the module."""
    names = [name for name in list(sys.modules) if name not in but]
    files = {name: getattr(sys.modules.get(name), "__file__", None) for name in names}
    return {name: file for name, file in files.items() if isinstance(file, str) and _is_users(name, file)}


def _is_users(name: str, file: str) -> bool:
    """Names that begin like `__main__` are of what no one imports: TensorFlow has such modules for code that it writes
    itself, into files that it removes. And torch has some that only say they were `_ops.py`, wherever we are."""
    return not name.startswith("__") and os.path.isabs(file) and file.endswith(".py") and not is_installed(file)


def _modified(file: str) -> int | None:
    with contextlib.suppress(OSError):
        return os.stat(file).st_mtime_ns
    return None
