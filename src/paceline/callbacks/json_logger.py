"""Results as one JSON file."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.callbacks.base import SGDCallback
from paceline.callbacks.log_dir import check_log_dir, make_log_dir
from paceline.callbacks.selection import WorkerSelection
from paceline.callbacks.tail_file import TailFile
from paceline.json_text import encode

_END = b"\n]"


class JsonLoggerCallback(SGDCallback):
    """Writes `results.json`: an array with one element per step, the list of the selected workers' dicts.

    A report costs one write at the end of the file, however long the file is, and after each write the file
    is complete JSON. Every run begins the file anew.

    `workers_to_log`: a rank, a list of ranks, or None for all. `logdir`: instead of the run's folder.
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
        self._selection.check(info.get("world_size"))
        self._logdir = make_log_dir(self._explicit_dir, logdir)
        self._file = TailFile(self._logdir / self._filename, b"[" + _END)
        self._separator = b"\n"

    def handle_result(self, results: list[dict[str, Any]], **info: Any) -> None:
        if self._file is None:
            return
        element = encode(self._selection.pick(results))
        self._file.replace_tail(_END, self._separator + element + _END)
        self._separator = b",\n"

    def finish_training(self, error: bool = False, **info: Any) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
