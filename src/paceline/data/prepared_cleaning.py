"""What goes from the cache of prepared batches: by age and by size, and never what is in use."""

import fcntl
import os
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.data.prepared_cache import KEY, LEFTOVER, LOCK, locked, manifest_of, remove

_DRAFT_GRACE_S = 60.0
"""A draft is locked a moment after it is made: one that is younger than this is left alone, locked or not."""
_NO_LOCKS_DRAFT_S = 3600.0
"""The same, where the file system knows no locks."""
_NO_LOCKS_S = 7 * 86_400.0
"""Where the file system knows no locks, what was used since then may be in use."""


@dataclass(frozen=True)
class Entry:
    key: str
    num_bytes: int
    used: float
    """When it was used last."""
    num_rows: int | None
    """None: its manifest cannot be read."""
    source: str
    """The class of the dataset."""
    is_in_use: bool = False


@dataclass(frozen=True)
class Policy:
    """What goes: what nobody has used for so long, then what was used least recently, until the rest is so small."""

    older_than_s: float = 30 * 86_400.0
    max_bytes: float = 50e9


DEFAULT = Policy()
"""After something was prepared, and of `paceline data gc`."""


def entries(root: Path) -> list[Entry]:
    """Those of a cache, the one used last first."""
    try:
        names = [name for name in os.listdir(root) if KEY.fullmatch(name)]
    except OSError:  # there is none, or nobody may look
        return []
    found = (_entry(root / name) for name in names)
    return sorted((one for one in found if one is not None), key=lambda one: (-one.used, one.key))


def _entry(path: Path) -> Entry | None:
    try:
        if not stat.S_ISDIR(path.lstat().st_mode):
            return None
        stats = [one.stat(follow_symlinks=False) for one in os.scandir(path)]
        lock = os.lstat(path / LOCK) if os.path.lexists(path / LOCK) else path.lstat()
    except OSError:  # it is being removed
        return None
    told = manifest_of(path)
    source = told.get("source") if told is not None else None
    return Entry(
        key=path.name,
        num_bytes=sum(one.st_size for one in stats),
        used=lock.st_mtime,
        num_rows=None if told is None else told["num_rows"],
        source=source if isinstance(source, str) else "?",
        is_in_use=_is_in_use(path, lock.st_mtime),
    )


def _is_in_use(path: Path, used: float) -> bool:
    try:
        fd = os.open(path / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        is_free = locked(fd, fcntl.LOCK_EX)
    finally:
        os.close(fd)
    return time.time() - used < _NO_LOCKS_S if is_free is None else not is_free


def to_remove(found: Sequence[Entry], policy: Policy, now: float) -> list[tuple[Entry, str]]:
    """Which entries go, and why. What is in use stays, and counts."""
    gone: dict[str, str] = {}
    for one in found:
        if one.num_rows is None:
            gone[one.key] = "damaged"
        elif now - one.used > policy.older_than_s:
            gone[one.key] = "age"
    used = {one.key for one in found if one.is_in_use}
    gone = {key: why for key, why in gone.items() if key not in used}
    total = sum(one.num_bytes for one in found if one.key not in gone)
    for one in sorted(found, key=lambda one: (one.used, one.key)):
        if total > policy.max_bytes and one.key not in used and one.key not in gone:
            gone[one.key] = "size"
            total -= one.num_bytes
    return [(one, gone[one.key]) for one in found if one.key in gone]


def clean(root: Path, policy: Policy = DEFAULT, now: float | None = None) -> list[tuple[Entry, str]]:
    """Remove what the policy says, and what was left by those who were killed. Gives what is gone."""
    now = time.time() if now is None else now
    for name in _leftovers(root, now):
        remove(root, name)
    return [(one, why) for one, why in to_remove(entries(root), policy, now) if remove(root, one.key)]


def _leftovers(root: Path, now: float) -> list[str]:
    try:
        names = [name for name in os.listdir(root) if LEFTOVER.fullmatch(name)]
    except OSError:
        return []
    return [name for name in names if name.startswith(".gone") or _is_left(root / name, now)]


def _is_left(draft: Path, now: float) -> bool:
    """Whether nobody writes it any more. It is as young as the youngest in it: while rows are written, only the time of
    their file moves."""
    times: list[float] = []
    try:
        times += [draft.lstat().st_mtime]
        with os.scandir(draft) as inner:
            times += [one.stat(follow_symlinks=False).st_mtime for one in inner]
        lock = os.open(draft / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:  # it is not locked yet, or gone
        return bool(times) and now - max(times) > _NO_LOCKS_DRAFT_S
    except OSError:
        return False
    try:
        is_free = locked(lock, fcntl.LOCK_SH)
    finally:
        os.close(lock)
    return is_free is not False and now - max(times) > (_DRAFT_GRACE_S if is_free else _NO_LOCKS_DRAFT_S)
