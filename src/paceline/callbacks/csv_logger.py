"""Results as one CSV table."""

import csv
import io
import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from paceline.callbacks.base import Callback
from paceline.callbacks.flatten import as_number, flatten
from paceline.callbacks.log_dir import check_log_dir, make_log_dir
from paceline.callbacks.selection import WorkerSelection
from paceline.callbacks.tail_file import TailFile
from paceline.json_text import encode

_RANK_COLUMN = "_rank"
_ROWS_PER_WRITE = 1_000


class CSVLoggerCallback(Callback):
    """Writes `results.csv`: one row per step, or one per step and rank.

    `worker_to_log` is a rank, or None for all, which adds the column `_rank`.

    Nested dicts become columns like `loss/train`; lists and arrays are written as JSON in one cell; what a
    report does not have stays empty. A key that appears later adds a column: the table is then rewritten
    once, beside the old one, and put in its place whole. Every run begins the file anew; a resumed run continues
    it after its last whole row, and steps that are made again appear again.
    """

    def __init__(
        self,
        logdir: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        worker_to_log: int | None = 0,
    ):
        self._explicit_dir = check_log_dir(logdir)
        self._filename = filename or "results.csv"
        self._selection = WorkerSelection(worker_to_log, "worker_to_log")
        self._logdir: Path | None = None
        self._file: TailFile | None = None
        self._columns: list[str] = []

    @property
    def logdir(self) -> Path | None:
        """Where the file is; None before the first run."""
        return self._logdir

    @property
    def log_path(self) -> Path | None:
        return None if self._logdir is None else self._logdir / self._filename

    def start_training(self, logdir: str, config: dict[str, Any], **info: Any) -> None:
        self._selection.check(info.get("num_workers"))
        self._logdir = make_log_dir(self._explicit_dir, logdir)
        path = self._logdir / self._filename
        self._columns, num_kept_bytes = _read_table(path) if info.get("is_resumed") else ([], 0)
        self._file = TailFile(path, num_kept_bytes=num_kept_bytes)

    def handle_result(self, results: list[dict[str, Any]], **info: Any) -> None:
        if self._file is None:
            return
        rows = [self._row(rank, result) for rank, result in self._selection.pick_ranked(results)]
        known = set(self._columns)
        added = list(dict.fromkeys(key for row in rows for key in row if key not in known))
        if added:
            self._add_columns(self._file, added)
        cells = [[row.get(column, "") for column in self._columns] for row in rows]
        self._file.replace_tail(b"", _csv_text(cells))

    def finish_training(self, error: bool = False, **info: Any) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _row(self, rank: int, result: dict[str, Any]) -> dict[str, str]:
        row = {_RANK_COLUMN: str(rank)} if self._selection.ranks is None else {}
        return row | {key: _cell(value) for key, value in flatten(result).items()}

    def _add_columns(self, file: TailFile, added: list[str]) -> None:
        header = _csv_text([[*self._columns, *added]])
        if self._columns:
            self._file = _widened(file, header, len(added))
            file.close()
        else:
            file.replace_tail(b"", header)
        self._columns.extend(added)


def _widened(old: TailFile, header: bytes, num_added: int) -> TailFile:
    """Puts a table with more columns in the place of the old one; its rows get empty cells there."""
    beside = _beside(old.path)
    new = TailFile(beside, header)
    try:
        with old.path.open("rb") as table:
            padding = b"," * num_added + b"\n"
            rows = (row[:-1] + padding for row in islice(_whole_rows(table), 1, None))  # without the old header
            for chunk in iter(lambda: b"".join(islice(rows, _ROWS_PER_WRITE)), b""):
                new.replace_tail(b"", chunk)
        new.move_to(old.path)
    except BaseException:
        new.close()
        beside.unlink(missing_ok=True)
        raise
    return new


def _read_table(path: Path) -> tuple[list[str], int]:
    """The columns of a table that an earlier driver wrote, and where its last whole row ends."""
    _beside(path).unlink(missing_ok=True)  # that driver may have been killed while it widened the table
    if not path.exists():
        return [], 0
    with path.open("rb") as table:
        rows = _whole_rows(table)
        header = next(rows, b"")
        num_bytes = len(header) + sum(map(len, rows))
    return next(csv.reader(io.StringIO(header.decode(), newline="")), []), num_bytes


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")


def _whole_rows(table: Iterable[bytes]) -> Iterator[bytes]:
    """Rows of a table that `_csv_text` wrote, one by one. A line break inside quotes does not end a row, and a last
    row without its line break is left out.

    Not csv.reader: that has a limit on the size of a cell, which a reported array can exceed.
    """
    row, is_quoted = b"", False
    for line in table:
        row += line
        is_quoted ^= bool(line.count(b'"') % 2)
        if not is_quoted and row.endswith(b"\n"):
            yield row
            row = b""


def _cell(value: Any) -> str:
    number = as_number(value)
    if number is not None:
        return repr(number)
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return encode(value).decode() if isinstance(value, list | tuple) or hasattr(value, "tolist") else str(value)


def _csv_text(rows: list[list[str]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode("utf-8", "backslashreplace")
