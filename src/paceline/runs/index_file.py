"""What was seen of run folders the last time, in a SQLite file: a cache, and nothing but that.

It is in the user's cache folder, one file for each root. Whatever is wrong with it (locked, read-only, damaged, made by
somebody else), reading answers with nothing and writing does nothing: then the folders themselves are read.
"""

import functools
import os
import re
import sqlite3
import stat
from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote
from zlib import crc32

_APPLICATION_ID = 0x50414345
_VERSION = 2
_LOCKED_S = 0.2
_ARE_NAMES = re.compile(r"[^./][^/]*(?:/[^./][^/]*)*", re.DOTALL)
"""Joined by slashes, none of them hidden."""
_TABLES = """
    CREATE TABLE root (path TEXT NOT NULL);
    CREATE TABLE folders (path TEXT PRIMARY KEY, mark INTEGER NOT NULL, names TEXT) WITHOUT ROWID;
    CREATE TABLE runs (path TEXT PRIMARY KEY, mark INTEGER NOT NULL, state TEXT NOT NULL, created REAL, started REAL,
                       ended REAL) WITHOUT ROWID;
    CREATE TABLE summaries (path TEXT PRIMARY KEY, mark TEXT NOT NULL, content BLOB NOT NULL) WITHOUT ROWID;
"""

Folder = tuple[int, tuple[str, ...] | None]
"""The mark of a folder, and the names of the folders in it; None: it is a run."""
Ended = tuple[int, str, float | None, float | None, float | None]
"""Of a run that has ended: the mark of its status.json, state, created, started, ended."""


@dataclass
class Known:
    """By path below the root."""

    folders: dict[str, Folder] = field(default_factory=dict)
    runs: dict[str, Ended] = field(default_factory=dict)


def index_path(root: Path) -> Path:
    """One file for each root, wherever links on the way to it lead."""
    cache = os.environ.get("XDG_CACHE_HOME") or ""
    if not os.path.isabs(cache):
        cache = os.path.expanduser("~/.cache")
    if not os.path.isabs(cache):  # a user without a home
        cache = os.devnull
    # Not hashlib, whose import takes longer than to read the index. The file says of which root it is.
    real = os.fsencode(os.path.realpath(root))
    return Path(cache, "paceline", f"runs-{_VERSION}-{crc32(real):08x}{crc32(real[::-1]):08x}.sqlite")


class IndexFile:
    """Opened for each question, and closed: nothing is held while folders are read. No method raises."""

    def __init__(self, root: Path, path: Path | None = None):
        self.path = index_path(root) if path is None else path
        self._root = os.fsencode(os.path.realpath(root)).hex()

    def load(self) -> Known:
        with suppress(sqlite3.Error, OSError, UnicodeError), closing(self._open()) as db:
            try:
                folders = db.execute("SELECT path, mark, names FROM folders").fetchall()
                runs = db.execute("SELECT path, mark, state, created, started, ended FROM runs").fetchall()
                names_of = functools.cache(_names)  # most folders have the same: run_001
                return Known(
                    folders={path: (mark, None if names is None else names_of(names)) for path, mark, names in folders},
                    runs={row[0]: row[1:] for row in runs},
                )
            except (sqlite3.DatabaseError, ValueError) as error:
                self._forget_if_damaged(error)
        return Known()

    def save(self, new: Known, gone: Known) -> None:
        """What has changed, in one transaction; what is in both is new. Who comes second overwrites: all tell the truth
        of some moment, and a mark that does not fit is noticed by the next reader."""
        folders = [
            (path, mark, None if names is None else "/".join(names))
            for path, (mark, names) in new.folders.items()
            if all(map(_is_text, (path, *(names or ()))))
        ]
        runs = [(path, *ended) for path, ended in new.runs.items() if _is_text(path)]
        gone_runs = [(path,) for path in gone.runs]
        if not (folders or runs or gone.folders or gone_runs):
            return
        with suppress(sqlite3.Error, OSError, UnicodeError), closing(self._open()) as db:
            db.execute("BEGIN IMMEDIATE")
            db.executemany("DELETE FROM folders WHERE path = ?", [(path,) for path in gone.folders])
            db.executemany("DELETE FROM runs WHERE path = ?", gone_runs)
            db.executemany("DELETE FROM summaries WHERE path = ?", gone_runs)
            db.executemany("INSERT OR REPLACE INTO folders VALUES (?, ?, ?)", folders)
            db.executemany("INSERT OR REPLACE INTO runs VALUES (?, ?, ?, ?, ?, ?)", runs)
            db.execute("COMMIT")

    def load_summaries(self, paths: Iterable[str]) -> dict[str, tuple[str, bytes]]:
        """The mark and the content of each that is there."""
        asked = set(paths)
        with suppress(sqlite3.Error, OSError, UnicodeError), closing(self._open()) as db:
            if len(asked) > 500:
                found = db.execute("SELECT path, mark, content FROM summaries").fetchall()
            else:
                marks = ",".join("?" * len(asked))
                found = db.execute(
                    f"SELECT path, mark, content FROM summaries WHERE path IN ({marks})", sorted(asked)
                ).fetchall()
            return {path: (mark, content) for path, mark, content in found if path in asked}
        return {}

    def save_summaries(self, summaries: Mapping[str, tuple[str, bytes]]) -> None:
        with suppress(sqlite3.Error, OSError, UnicodeError), closing(self._open()) as db:
            db.execute("BEGIN IMMEDIATE")
            rows = [(path, mark, content) for path, (mark, content) in summaries.items()]
            db.executemany("INSERT OR REPLACE INTO summaries VALUES (?, ?, ?)", rows)
            db.execute("COMMIT")

    def _open(self) -> sqlite3.Connection:
        """Made if there is none. OSError for a file that is not ours to use, sqlite3.Error for one that cannot be."""
        try:
            found = os.lstat(self.path)
        except FileNotFoundError:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        else:
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                raise PermissionError(f"{self.path} is not an index of this user")
        mode = "rwc" if os.access(self.path.parent, os.W_OK) else "ro"
        db = sqlite3.connect(
            f"file:{quote(str(self.path))}?mode={mode}", uri=True, timeout=_LOCKED_S, isolation_level=None
        )
        try:
            self._check(db)
        except BaseException as error:
            db.close()
            if isinstance(error, sqlite3.DatabaseError | UnicodeError):  # what it says of damaged text may be none
                self._forget_if_damaged(error)
            raise
        return db

    def _check(self, db: sqlite3.Connection) -> None:
        db.execute("PRAGMA synchronous = OFF")  # a kill of the process loses nothing by it, and a crash only the cache
        [application], [version] = (
            db.execute(f"PRAGMA {name}").fetchone() for name in ("application_id", "user_version")
        )
        if application == 0 and db.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,):
            self._make(db)
        elif application != _APPLICATION_ID or version != _VERSION:
            raise PermissionError(f"{self.path} is an index of another program, or of another version")
        elif db.execute("SELECT path FROM root").fetchall() != [(self._root,)]:
            raise PermissionError(f"{self.path} is an index of another folder")

    def _make(self, db: sqlite3.Connection) -> None:
        db.execute("BEGIN IMMEDIATE")
        if db.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,):  # nobody was quicker
            for statement in filter(str.strip, _TABLES.split(";")):
                db.execute(statement)
            db.execute("INSERT INTO root VALUES (?)", (self._root,))
            db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            db.execute(f"PRAGMA user_version = {_VERSION}")
        db.execute("COMMIT")

    def _forget_if_damaged(self, error: Exception) -> None:
        """The next reader makes a new one. Not one that is only locked, or cannot be written now."""
        if not isinstance(error, sqlite3.OperationalError):
            with suppress(OSError):
                self.path.unlink()


def _names(text: Any) -> tuple[str, ...]:
    """They become paths: what is no name of a folder in this one is damage."""
    if not isinstance(text, str) or "\0" in text or (text and not _ARE_NAMES.fullmatch(text)):
        raise ValueError(f"not names of folders: {text!r}")
    return tuple(text.split("/")) if text else ()


def _is_text(path: str) -> bool:
    """A name that is not UTF-8 is not kept: its folder is read each time."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True
