"""All runs below a folder, soon: what has not changed since the last time is not read again.

What proves it, for a reader who trusts the kernel alone:

    folder        device, inode, size, mtime and ctime: nothing was added, removed or renamed in it
    status.json   the same: it is the file that was read. One lstat tells, too, that the run is still there

A mark counts only if it is older than two seconds when it is taken, so that nothing can change within the same tick of
the file system's clock. Of runs that have not ended nothing is kept: their status is read and judged anew.
"""

import logging
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from paceline.json_text import decode
from paceline.regular_files import DOCUMENT_BYTES
from paceline.runs.index_file import Ended, Folder, IndexFile, Known
from paceline.runs.load import MAX_SEARCH_DEPTH, Run
from paceline.runs.logdir import results_dir, run_number
from paceline.runs.status import RunState, RunStatus, find_driver, judge

logger = logging.getLogger(__name__)

_SETTLED_NS = 2_000_000_000
_FINAL = {state.value: state for state in RunState if state.is_final}
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_OWN_FILES = ("run.json", "status.json")
_MOST_FOLDERS = 200_000
"""That are no runs: somebody may have named a folder with the whole disk below it."""


class Found(NamedTuple):
    """A run in a listing. `name` is its path below the root; what else is to be known is in the `Run` at `path`."""

    name: str
    path: str
    state: RunState
    created: float | None
    started: float | None
    ended: float | None

    @property
    def run(self) -> Run:
        return Run(Path(self.path))


def find_runs(
    root: str | os.PathLike[str] | None = None,
    *,
    clock: Callable[[], float] = time.time,
    cache: IndexFile | None = None,
    tell: Callable[[str], None] = logger.warning,
    most_folders: int = _MOST_FOLDERS,
) -> list[Found]:
    """What `list_runs` finds, newest first, each with its present state. Reading runs nothing and follows no link. If
    there are more folders than it looks into, it tells so."""
    top = results_dir() if root is None else Path(os.path.expanduser(root)).absolute()
    cache = IndexFile(top) if cache is None else cache
    search = _Search(cache.load(), clock, most_folders)
    search.look("", str(top), MAX_SEARCH_DEPTH)
    if search.num_left <= 0:
        tell(
            f"{top} has more than {most_folders} folders that are no runs; what is in the others is not listed. Is it "
            "the results folder? PACELINE_RESULTS names it."
        )
    cache.save(search.new, search.unseen)
    return sorted(search.found, key=lambda run: (run.created or 0.0, run.path.rpartition("/")[2]), reverse=True)


def mark_of(found: os.stat_result) -> int:
    """Of 64 bits, which thousands of marks are read and compared as sooner than as text. That of a changed file is
    another, but for one in 10¹⁹; another Python may count otherwise, and then reads anew."""
    return hash((found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns))


def is_settled(found: os.stat_result, now: float) -> bool:
    """Whether a change from now on would show. By ctime, which nobody can set back."""
    return now * 1e9 - found.st_ctime_ns > _SETTLED_NS


class _Search:
    """One walk through the folders below a root. What was known before it and still holds is taken out of `unseen`:
    what is left there in the end is no more. Cheap for each run, since there may be thousands."""

    def __init__(self, former: Known, clock: Callable[[], float], most_folders: int):
        self.num_left = most_folders
        self.found: list[Found] = []
        self.new = Known()
        self.unseen = former
        self._clock = clock

    def look(self, name: str, path: str, depth: int) -> None:
        """In a folder that is not known to be a run by its name."""
        names = self._names(name, path)
        if names is None:
            self._take(name or os.path.basename(path), path)
            return
        self.num_left -= 1
        if depth == 0 or self.num_left <= 0:
            return
        for one in names:
            below, inside = (f"{name}/{one}" if name else one), f"{path}/{one}"
            if run_number(one) is not None:
                self._take(below, inside)
            else:
                self.look(below, inside, depth - 1)

    def _names(self, name: str, path: str) -> tuple[str, ...] | None:
        """Of the folders in it; None if it is a run itself."""
        try:
            found = os.lstat(path) if name else os.stat(path)  # the root may be a link: its user has named it
        except (OSError, ValueError):
            return ()
        mark, known = mark_of(found), self.unseen.folders.get(name)
        if known is not None and known[0] == mark:
            del self.unseen.folders[name]
            return known[1]
        if not stat.S_ISDIR(found.st_mode):
            return ()
        folder: Folder = mark, _listed(path, is_named=not name and run_number(os.path.basename(path)) is not None)
        if is_settled(found, self._clock()):
            self.new.folders[name] = folder
        return folder[1]

    def _take(self, name: str, path: str) -> None:
        place = f"{path}/status.json"
        try:
            mark = mark_of(os.lstat(place))
        except (OSError, ValueError):
            mark = None
        known = self.unseen.runs.get(name)
        if known is not None and known[0] == mark and known[1] in _FINAL:
            del self.unseen.runs[name]
        else:
            known = self._read(name, path, place)
        _, state, created, started, ended = known
        self.found.append(Found(name, path, _FINAL.get(state) or RunState(state), created, started, ended))

    def _read(self, name: str, path: str, place: str) -> Ended:
        """From the file, if it is a plain one; what else may be in its place is for `Run.status` to say."""
        mark, status, is_lasting = 0, None, False
        try:
            fd = os.open(place, _READ)
        except (OSError, ValueError):
            fd = -1
        if fd >= 0:
            try:
                found = os.fstat(fd)
                if stat.S_ISREG(found.st_mode) and found.st_size <= DOCUMENT_BYTES:
                    mark, is_lasting = mark_of(found), is_settled(found, self._clock())
                    fields = decode(os.read(fd, found.st_size + 1))
                    status = RunStatus.from_fields(fields) if isinstance(fields, dict) else None
            except OSError:
                status = None
            finally:
                os.close(fd)
        if status is None:
            status, is_lasting = Run(Path(path), self._clock).status, False
        elif not status.state.is_final:
            status, is_lasting = judge(status, now=self._clock(), driver=find_driver(status)), False
        created, started, ended_at = map(_seconds, (status.created, status.started, status.ended))
        ended = mark, status.state.value, created, started, ended_at
        if is_lasting:
            self.new.runs[name] = ended
        return ended


def _seconds(value: float | None) -> float | None:
    """JSON has whole numbers that SQLite does not take."""
    return None if value is None else float(value)


def _listed(path: str, is_named: bool) -> tuple[str, ...] | None:
    """Without hidden ones and links, which may lead anywhere; none of what cannot be read."""
    names = []
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                if is_named or (entry.name in _OWN_FILES and os.path.isfile(entry.path)):
                    return None
                if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False):
                    names.append(entry.name)
    except (OSError, ValueError):
        return ()
    return None if is_named else tuple(sorted(names))
