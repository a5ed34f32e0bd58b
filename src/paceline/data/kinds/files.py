"""Files that hold rows, on this machine or behind a URL: found, opened, and tried again when their storage fails."""

from __future__ import annotations

import glob
import os
import stat
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from paceline.errors import ArgumentError, ArgumentTypeError, DataError

_TRIES_S = (0.2, 1.0, 3.0)
"""How long to wait before each further try."""
_AT_ONCE = 16


class File:
    """One file. `path` is a path of this machine, or a URL."""

    def __init__(self, path: str, size: int, is_local: bool):
        self.path, self.size, self.is_local = path, size, is_local
        self.is_failing = False

    @property
    def name(self) -> str:
        return self.path.rstrip("/").rpartition("/")[2]

    def open(self) -> Any:
        if self.is_local:
            self.check()
            return self.path
        import fsspec

        return fsspec.open(self.path, "rb").open()

    def check(self) -> None:
        """Before a file of this machine is opened: what is there now is a file, since a pipe would block for ever, and
        as large as it was. One that was written anew has its rows elsewhere, which would be read torn."""
        found = os.stat(self.path)
        if not stat.S_ISREG(found.st_mode):
            raise DataError(f"{self.path} is not a file any more.")
        if found.st_size != self.size:
            raise DataError(
                f"{self.path} has {found.st_size} bytes now, and had {self.size} when the dataset was made. Leave "
                "files alone while they are read, or make the dataset anew."
            )

    def bytes(self, start: int, stop: int) -> bytes:
        opened = self.open()
        with open(opened, "rb") if self.is_local else opened as file:
            file.seek(start)
            found: bytes = file.read(stop - start)
        if len(found) < stop - start:
            raise DataError(f"{self.path} has become shorter since it was opened first.")
        return found

    def part(self, name: str, act: Callable[[], Any], advice: str = "") -> Any:
        """What `act` reads, a part of that name. Storage that fails is asked again a few times; what a file holds does
        not get better by that. Errors say which file it is, and which part of it."""
        import pyarrow as pa

        try:
            return self._retried(act)
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, pa.ArrowKeyError) as error:
            raise DataError(
                f"{self.path}: {name} cannot be read: {error}. Is the file damaged, cut off, or of another kind?"
                + (f" {advice}." if advice else "")
            ) from error
        except FileNotFoundError as error:
            raise DataError(f"{self.path} is not there (any more).") from error
        except OSError as error:
            raise DataError(f"{self.path}: {name} cannot be read: {type(error).__name__}: {error}") from error

    def _retried(self, act: Callable[[], Any]) -> Any:
        for wait_s in (*_TRIES_S, None):
            try:
                made = act()
            except FileNotFoundError:
                raise
            except OSError:
                self.is_failing = True
                if wait_s is None or self.is_local:
                    raise
                time.sleep(wait_s)
            else:
                self.is_failing = False
                return made
        raise AssertionError("not reached")


class Files(Sequence[File]):
    def __init__(self, files: Sequence[File], given: str):
        self._files, self._given = tuple(files), given

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, number: Any) -> Any:
        return self._files[number]

    def describe(self) -> Any:
        paths = [file.path for file in self._files]
        return paths if len(paths) <= 16 else [*paths[:15], f"… {len(paths) - 15} more"]

    def __str__(self) -> str:
        return self._given


def find_files(paths: Any, endings: Sequence[str]) -> Files:
    """Paths, globs, folders (for the files below them that end so) and URLs, or a list of these."""
    given = [paths] if isinstance(paths, str | os.PathLike) else paths
    if not isinstance(given, list | tuple) or not given:
        raise ArgumentTypeError(f"paths={paths!r}: expected a path, a glob, a URL, or a list of these.")
    found: list[File] = []
    for one in given:
        if not isinstance(one, str | os.PathLike):
            raise ArgumentTypeError(f"paths: {one!r} is a {type(one).__name__}; expected text or a path.")
        text = os.fspath(one)
        found += _remote(text, endings) if "://" in text else _local(text, endings)
    return Files(found, ", ".join(map(str, given[:3])) + (" …" if len(given) > 3 else ""))


def _local(path: str, endings: Sequence[str]) -> list[File]:
    path = os.path.expanduser(path)
    if os.path.isdir(path):
        names = _below(path, endings)
        if not names:
            raise ArgumentError(f"{path}: there is no file in this folder whose name ends with {' or '.join(endings)}.")
    elif os.path.lexists(path):
        names = [path]
    else:
        names = _matching(path, endings)
    if not names:
        what = "matches no file" if glob.has_magic(path) else "is not there"
        raise ArgumentError(
            f"{path}: this {'pattern' if glob.has_magic(path) else 'path'} {what}. It was looked for in {os.getcwd()}."
        )
    return [File(os.path.abspath(name), _size_of(name), is_local=True) for name in names]


def _below(folder: str, endings: Sequence[str]) -> list[str]:
    """What a folder that cannot be read holds would be missing, and nobody would know: that is an error."""

    def refuse(error: OSError) -> None:
        raise ArgumentError(f"{error.filename}: this folder cannot be read: {error.strerror}.") from error

    found = [Path(place, name) for place, _, names in os.walk(folder, onerror=refuse) for name in names]
    return [str(one) for one in sorted(found) if one.name.endswith(tuple(endings))]


def _matching(pattern: str, endings: Sequence[str]) -> list[str]:
    """Of folders, those whose name is that of a file are meant, as other tools write them: for the files in them."""
    found: dict[str, None] = {}
    for name in sorted(glob.glob(pattern, recursive=True)):
        if not os.path.isdir(name):
            found[name] = None
        elif name.endswith(tuple(endings)):
            found |= dict.fromkeys(_below(name, endings))
    return list(found)


def _size_of(path: str) -> int:
    try:
        found = os.stat(path)
    except OSError as error:
        what = "is a link that leads nowhere" if os.path.islink(path) else f"cannot be read: {error.strerror}"
        raise ArgumentError(f"{path} {what}.") from error
    if not stat.S_ISREG(found.st_mode):
        raise ArgumentError(f"{path} is not a file, but a pipe, a socket or a device.")
    return found.st_size


def _remote(url: str, endings: Sequence[str]) -> list[File]:
    import fsspec

    try:
        fs, path = fsspec.core.url_to_fs(url)
        if glob.has_magic(path):
            names = sorted(fs.glob(path))
        elif fs.isdir(path):
            names = sorted(name for name in fs.find(path) if name.endswith(tuple(endings)))
        else:
            names = [path] if fs.exists(path) else []
        sizes = {name: int(fs.size(name) or 0) for name in names}
    except (ImportError, ValueError) as error:  # fsspec says what is missing, or what it does not know
        raise ArgumentError(f"{url}: {error}") from error
    except OSError as error:
        raise DataError(f"{url}: the storage cannot be asked for its files: {type(error).__name__}: {error}") from error
    if not names:
        raise ArgumentError(f"{url}: there is no such file.")
    return [File(fs.unstrip_protocol(name), sizes[name], is_local=False) for name in names]


def in_parallel(act: Callable[[File], Any], files: Sequence[File]) -> list[Any]:
    with ThreadPoolExecutor(min(_AT_ONCE, len(files))) as threads:
        return list(threads.map(act, files))
