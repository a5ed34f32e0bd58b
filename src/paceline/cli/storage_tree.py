"""A storage root: measured and removed from, and never left.

Paths are walked from the root by descriptors, a name at a time, and a link on the way is refused: what a name meant
when it was looked at is what is acted upon, whoever changes it meanwhile.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ArgumentError, RunNotFoundError
from paceline.folder_removal import remove_folder

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MOST_DEPTH = 200
"""A folder that is deeper counts as one that cannot be read: each level takes a descriptor, and some of the stack."""


def storage_root(given: str | None, is_here: bool = True) -> Path:
    """The folder that --root or PACELINE_STORAGE names; with `is_here`, one that this machine has."""
    if not given:
        raise ArgumentError("Which storage? Name its folder: --root DIR, or PACELINE_STORAGE.")
    path = Path(given).expanduser().absolute()
    if is_here and not path.is_dir():
        raise ArgumentError(f"{path} is no folder: expected the root of the storage in --root or PACELINE_STORAGE.")
    return path


@dataclass(frozen=True)
class Entry:
    name: str
    kind: str
    """folder, file, link or other"""
    num_bytes: int
    num_files: int
    entries: tuple["Entry", ...] = ()
    """Those that are shown, the largest first; all count."""
    num_unread: int = 0


def measure(root: Path, path: str, depth: int) -> Entry:
    """What is at a path below the root. ArgumentError if it leads out, RunNotFoundError if there is nothing."""
    parts = _parts(path)
    if not parts:
        with _opened(root, []) as fd:
            return _measured(fd, ".", str(root), depth)
    with _opened(root, parts[:-1]) as fd:
        try:
            os.stat(parts[-1], dir_fd=fd, follow_symlinks=False)
        except OSError:
            raise RunNotFoundError(f"There is no {path} in {root}.") from None
        return _measured(fd, parts[-1], path, depth)


def check_removable(root: Path, path: str) -> None:
    """ArgumentError for the storage itself, and for what is not in it."""
    if not _parts(path):
        raise ArgumentError(f"{path!r} is the storage itself, {root}: expected a folder or a file in it.")


def remove(root: Path, path: str) -> None:
    """Of a link, the link."""
    check_removable(root, path)
    parts = _parts(path)
    with _opened(root, parts[:-1]) as fd:
        try:
            found = os.stat(parts[-1], dir_fd=fd, follow_symlinks=False)
            if stat.S_ISDIR(found.st_mode):
                remove_folder(parts[-1], dir_fd=fd)
            else:
                os.unlink(parts[-1], dir_fd=fd)
        except FileNotFoundError:
            raise RunNotFoundError(f"There is no {path} in {root}.") from None
        except OSError as error:
            raise ArgumentError(f"{path} cannot be removed: {error.strerror or error}.") from error


def _parts(path: str) -> list[str]:
    """Without `..`, which would be another folder behind a link, and relative: the root is named by its user alone."""
    if os.path.isabs(path):
        raise ArgumentError(f"{path!r} is an absolute path: expected one below the root of the storage, as images/a.")
    if "\0" in path or ".." in path.split("/"):
        raise ArgumentError(f"{path!r} leads out of the storage: expected a path below its root, without `..`.")
    return [part for part in path.split("/") if part not in ("", ".")]


@contextmanager
def _opened(root: Path, parts: list[str]) -> Iterator[int]:
    """The folder at that path."""
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for place, part in enumerate(parts):
            try:
                inner = os.open(part, _FOLDER, dir_fd=fd)
            except FileNotFoundError:
                raise RunNotFoundError(f"There is no {'/'.join(parts[: place + 1])} in {root}.") from None
            except OSError as error:
                way = "/".join(parts[: place + 1])
                raise ArgumentError(f"{way} in {root} is a link, or no folder: {error.strerror}.") from error
            os.close(fd)
            fd = inner
        yield fd
    finally:
        os.close(fd)


def _measured(parent: int, name: str, shown: str, depth: int, level: int = 0) -> Entry:
    try:
        found = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except OSError:
        return Entry(shown, "other", 0, 0, num_unread=1)
    if not stat.S_ISDIR(found.st_mode):
        kind = "file" if stat.S_ISREG(found.st_mode) else "link" if stat.S_ISLNK(found.st_mode) else "other"
        return Entry(shown, kind, found.st_size if kind == "file" else 0, int(kind == "file"))
    if level > _MOST_DEPTH:
        return Entry(shown, "folder", 0, 0, num_unread=1)
    try:
        fd = os.open(name, _FOLDER, dir_fd=parent)
    except OSError:
        return Entry(shown, "folder", 0, 0, num_unread=1)
    try:
        entries = [_measured(fd, one, one, depth - 1, level + 1) for one in os.listdir(fd)]
    except OSError:
        return Entry(shown, "folder", 0, 0, num_unread=1)
    finally:
        os.close(fd)
    entries.sort(key=lambda one: (-one.num_bytes, one.name))
    return Entry(
        shown,
        "folder",
        sum(one.num_bytes for one in entries),
        sum(one.num_files for one in entries),
        tuple(entries) if depth > 0 else (),
        sum(one.num_unread for one in entries),
    )
