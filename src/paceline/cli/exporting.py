"""A run as one file: its folder as an archive, or its metrics as a table."""

import csv
import io
import os
import stat
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from paceline.errors import ArgumentError, RunNotFoundError
from paceline.json_text import encode_document, encode_line
from paceline.regular_files import walk
from paceline.runs.load import Run
from paceline.runs.summary import read_series

KINDS = ("tar.gz", "tar", "csv", "jsonl", "json")


def write(run: Run, kind: str, out: str, force: bool) -> int:
    """How many things of the folder were left out, since they are no files. The file appears when it is whole."""
    with _opened(out, force) as file:
        if kind in ("tar", "tar.gz"):
            num_left_out = _write_tar(run, file, "gz" if kind == "tar.gz" else "")
        else:
            num_left_out = 0
            _write_metrics(run, file, kind)
        if not run.path.is_dir():  # asked at the end: files that are gone by then have been passed over
            raise RunNotFoundError(f"{run.path} is no longer there: somebody has removed it meanwhile.")
    return num_left_out


def _write_metrics(run: Run, file: IO[bytes], kind: str) -> None:
    rows = list(metric_rows(run))
    if kind == "csv":
        file.write(_csv(rows).encode())
    elif kind == "json":
        file.write(encode_document(rows))
    else:
        file.writelines(encode_line(row) for row in rows)


def metric_rows(run: Run) -> Iterator[dict[str, Any]]:
    """A row for each step, with a column for each metric."""
    series = read_series(run.path)
    by_step: dict[int, dict[str, Any]] = {}
    for name, (steps, values) in series.items():
        for step, value in zip(steps, values, strict=True):
            by_step.setdefault(step, {})["reported_step" if name == "step" else name] = value
    for step in sorted(by_step):
        yield {"step": step, **by_step[step]}


def _csv(rows: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _write_tar(run: Run, file: IO[bytes], compression: str) -> int:
    num_left_out = 0
    _check_room(run, file)
    with tarfile.open(fileobj=file, mode=f"w|{compression}") as archive:  # type: ignore[call-overload]
        for folder, folders, names in walk(run.path):
            inside = os.path.join(run.name, os.path.relpath(folder, run.path))
            num_left_out += sum(os.path.islink(os.path.join(folder, one)) for one in folders)
            for name in sorted(names):
                num_left_out += not _add(
                    archive, os.path.join(folder, name), os.path.normpath(os.path.join(inside, name))
                )
    return num_left_out


def _check_room(run: Run, file: IO[bytes]) -> None:
    """A file may claim to be larger than any disk."""
    size = 0
    for folder, _, names in walk(run.path):
        for name in names:
            with suppress(FileNotFoundError):  # a run that goes on replaces files
                size += os.lstat(os.path.join(folder, name)).st_size
    found = os.fstatvfs(file.fileno())
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode) and size > found.f_bavail * found.f_frsize:
        raise ArgumentError(f"{run.path} has {size:,} bytes, and there is no room for so much. Name another place.")


def _add(archive: tarfile.TarFile, path: str, name: str) -> bool:
    """Only a regular file, and as large as it is now, even if it grows meanwhile."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:  # a run that goes on has replaced it
        return True
    except OSError:
        return False
    with open(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            return False
        info = tarfile.TarInfo(name)
        info.size, info.mtime, info.mode = found.st_size, found.st_mtime, 0o644
        archive.addfile(info, file)
    return True


@contextmanager
def _opened(out: str, force: bool) -> Iterator[IO[bytes]]:
    if out == "-":
        yield sys.stdout.buffer
        sys.stdout.flush()
        return
    path = Path(out).expanduser()
    if path.exists() and not path.is_file():  # a device or a pipe would be gone, and a file in its place
        raise ArgumentError(f"{out} is a folder, or no regular file: name a file. -o - writes to stdout.")
    if path.exists() and not force:
        raise ArgumentError(f"{out} exists: name another file, or say --force.")
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(beside, "xb") as file:
            yield file
        os.replace(beside, path)
    except RunNotFoundError:  # an OSError too, and none of this file's
        raise
    except OSError as error:
        raise ArgumentError(f"{out} cannot be written: {error.strerror or error}.") from error
    finally:
        with suppress(OSError):  # it is not there, or the place is no folder
            beside.unlink()
