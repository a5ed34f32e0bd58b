"""The cache of prepared batches: a folder for each dataset, named after the hash of all that it was made of.

    <cache>/1f0c…/manifest.json    what it is, written last
                  rows.arrow       the rows
                  lock             held by those who read it; its time is that of the last use
           /.draft-…               one that is being written: renamed when it is whole

Nothing heavy is imported here: `paceline data gc` only looks and removes. How rows are written is in `torch_prepared`,
and what goes in `prepared_cleaning`.
"""

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.json_text import decode, encode_document
from paceline.regular_files import UnreadableFileError, open_regular, read_regular

FORMAT, VERSION = "paceline.prepared", 1
ROWS, MANIFEST, LOCK = "rows.arrow", "manifest.json", "lock"
KEY = re.compile(r"[0-9a-f]{32}")
LEFTOVER = re.compile(r"\.(draft|gone)-[0-9a-f]+")
_MOST_MANIFEST_BYTES = 16 * 2**20


def prepared_dir(root: str | os.PathLike[str] | None = None) -> Path:
    """Where it is: in the shared storage (`root`, else PACELINE_STORAGE), else in the user's cache."""
    storage = root or os.environ.get("PACELINE_STORAGE")
    if storage:
        return Path(storage).expanduser().absolute() / ".prepared"
    cache = os.environ.get("XDG_CACHE_HOME") or ""
    return Path(cache if os.path.isabs(cache) else os.path.expanduser("~/.cache"), "paceline", "prepared")


# --- reading ----------------------------------------------------------------------------------------------------------


class Hold:
    """Somebody reads an entry: until it is released, or the process ends, the entry is not removed."""

    def __init__(self, path: Path, fd: int):
        self.path, self._fd = path, fd

    def release(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def hold(path: Path) -> Hold | None:
    """None if it is not there (any more). Notes the use."""
    for flags in (os.O_RDWR | os.O_CREAT, os.O_RDONLY):  # storage may be read-only here
        try:
            fd = os.open(path / LOCK, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            break
        except OSError:
            continue
    else:
        return None
    # After the lock it is looked for again: who removes an entry takes it out of its place first.
    if locked(fd, fcntl.LOCK_SH) is False or not _is_same_file(path / LOCK, fd) or manifest_of(path) is None:
        os.close(fd)
        return None
    with contextlib.suppress(OSError):
        os.utime(fd)
    return Hold(path, fd)


def _is_same_file(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except OSError:
        return False


def manifest_of(path: Path) -> dict[str, Any] | None:
    """None if there is none that says what it should."""
    try:
        told = decode(read_regular(path / MANIFEST, _MOST_MANIFEST_BYTES, path))
    except (OSError, UnreadableFileError):
        return None
    if not isinstance(told, dict) or (told.get("format"), told.get("version")) != (FORMAT, VERSION):
        return None
    numbers = [told.get(name) for name in ("num_rows", "num_bytes", "crc32")]
    return told if all(type(one) is int and one >= 0 for one in numbers) and told.get("key") == path.name else None


def is_there(root: Path, base: str) -> bool:
    """Whether any entry was made of what has this hash, and of whatever rows."""
    try:
        names = [name for name in os.listdir(root) if KEY.fullmatch(name)]
    except OSError:
        return False
    return any((manifest_of(root / name) or {}).get("base") == base for name in names)


def is_whole(path: Path) -> bool:
    """Whether every byte of the rows is as it was written. Reads all of them."""
    told = manifest_of(path)
    if told is None:
        return False
    crc = num_bytes = 0
    try:
        with open(open_regular(path / ROWS, path), "rb") as file:
            while block := file.read(2**20):
                crc, num_bytes = zlib.crc32(block, crc), num_bytes + len(block)
    except (OSError, UnreadableFileError):
        return False
    return (crc, num_bytes) == (told["crc32"], told["num_bytes"])


# --- writing ----------------------------------------------------------------------------------------------------------


class Draft:
    """An entry to be. Nobody sees it before `commit`; if that does not come, `discard` it, or `clean` will."""

    def __init__(self, root: Path):
        root.mkdir(parents=True, exist_ok=True)
        self._root, self.path = root, root / f".draft-{secrets.token_hex(8)}"
        self.path.mkdir()
        self._fd = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        locked(self._fd, fcntl.LOCK_EX)

    def commit(self, key: str, manifest: Mapping[str, Any]) -> Hold | None:
        """Give it its place, and hold it. If another process was quicker, its work stands, which is the same."""
        told = {"format": FORMAT, "version": VERSION, "key": key, "created": time.time(), **manifest}
        with open(self.path / MANIFEST, "wb") as file:
            file.write(encode_document(told))
            file.flush()
            os.fsync(file.fileno())
        place = self._root / key
        if not is_whole(place):  # what is there and is not whole would stay in the way
            remove(self._root, key)
        try:
            os.rename(self.path, place)
        except OSError:
            self.discard()
            return hold(place)
        locked(self._fd, fcntl.LOCK_SH)
        fd, self._fd = self._fd, -1
        return Hold(place, fd)

    def discard(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


# --- removing ---------------------------------------------------------------------------------------------------------


def remove(root: Path, key: str) -> bool:
    """Whether it is gone now: one that is in use stays. Nothing outside of the cache is touched, whatever links say."""
    if not (KEY.fullmatch(key) or LEFTOVER.fullmatch(key)):
        return False
    with _opened(root) as folder:
        if folder is None:
            return True
        try:
            inner = os.open(key, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        except OSError:  # nothing, or a link or a file, which is no entry
            return not _exists(key, folder)
        try:
            lock = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666, dir_fd=inner)
        except OSError:
            return False
        finally:
            os.close(inner)
        try:
            if locked(lock, fcntl.LOCK_EX) is False:
                return False
            # Renamed first: who looks for it now finds nothing, and not the half of it.
            gone = key if key.startswith(".gone") else f".gone-{secrets.token_hex(8)}"
            os.rename(key, gone, src_dir_fd=folder, dst_dir_fd=folder)
            shutil.rmtree(gone, dir_fd=folder)
        except OSError:
            return False
        finally:
            os.close(lock)
    return True


def locked(fd: int, kind: int) -> bool | None:
    """Whether the lock could be had, without waiting; None where there are no locks."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


@contextlib.contextmanager
def _opened(root: Path) -> Iterator[int | None]:
    try:
        fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)


def _exists(name: str, folder: int) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True
