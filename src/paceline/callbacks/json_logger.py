"""Results as one JSON file."""

import logging
import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.callbacks.base import Callback
from paceline.callbacks.log_dir import check_log_dir, make_log_dir
from paceline.callbacks.selection import WorkerSelection
from paceline.callbacks.tail_file import TailFile
from paceline.json_text import decode, encode

logger = logging.getLogger(__name__)

_END = b"\n]"


class JsonLoggerCallback(Callback):
    """Writes `results.json`: an array with one element per step, the list of the selected workers' dicts.

    A report costs one write at the end of the file, however long the file is, and after each write the file
    is complete JSON. Every run begins the file anew; a resumed run continues it, and makes it whole if the former
    driver was killed while writing. Steps that are made again then appear again.

    `workers_to_log`: a rank, a list of ranks, or None for all; a step that has none of them is left out.
    `logdir`: instead of the run's folder.
    """

    def __init__(
        self,
        logdir: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        workers_to_log: int | Sequence[int] | None = 0,
    ):
        self._explicit_dir = check_log_dir(logdir)
        self._filename = filename or "results.json"
        self._selection = WorkerSelection(workers_to_log)
        self._logdir: Path | None = None
        self._file: TailFile | None = None
        self._separator = b"\n"

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
        num_kept_bytes = _end_of_elements(path) if info.get("is_resumed") else 0
        self._file = TailFile(path, _END if num_kept_bytes else b"[" + _END, num_kept_bytes)
        self._separator = b",\n" if num_kept_bytes else b"\n"

    def handle_result(self, results: list[dict[str, Any]], **info: Any) -> None:
        if self._file is None:
            return
        picked = self._selection.pick(results)
        if not picked:
            return
        self._file.replace_tail(_END, self._separator + encode(picked) + _END)
        self._separator = b",\n"

    def finish_training(self, error: bool = False, **info: Any) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _end_of_elements(path: Path) -> int:
    """Where the last whole element ends in a file that this callback wrote, one element a line; 0 if it has none.

    A file that looks different (somebody indented it) is moved aside: it can neither be continued nor thrown away.
    """
    if not path.exists():
        return 0
    # A write that was cut short can have spoilt the line that it added, and the end of the one before.
    last_lines: deque[tuple[int, bytes]] = deque(maxlen=3)
    num_bytes = 0
    with path.open("rb") as file:
        for line in file:
            last_lines.append((num_bytes, line))
            num_bytes += len(line)
    for start, line in reversed(last_lines):
        element = _element(line) if start else b""
        if element:
            return start + len(element)
    if not last_lines or (len(last_lines) < 3 and last_lines[0][1].rstrip() == b"["):
        return 0
    aside = path.with_name(f"{path.name}.old")
    os.replace(path, aside)
    logger.warning("%s is not as JsonLoggerCallback writes it. It is now %s, and a new file begins.", path, aside.name)
    return 0


def _element(line: bytes) -> bytes:
    """The element on a line, without what separates it from the next; empty if there is no whole one."""
    for end in (b"\n", b",\n", b"", b",", b",]"):  # the last ones where a write was cut short
        body = line.removesuffix(end)
        if body.startswith(b"[{") and body + end == line and isinstance(decode(body), list):
            return body
    return b""
