"""A worker's output: into a file, from where the driver reads what is new."""

import codecs
import contextlib
import io
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_CHUNK_BYTES = 1 << 20


def redirect_output(path: str) -> None:
    """Send this process's output, also that of C code and of its children, to the file."""
    flush_output()
    try:
        fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    except OSError:
        return
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    for name, number in (("stdout", 1), ("stderr", 2)):
        raw = io.BufferedWriter(_LogFile(number, "w", closefd=False))
        stream = io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)
        setattr(sys, name, stream)


class _LogFile(io.FileIO):
    """A log that never takes the training down: a full disk costs the line, not the run."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


class LogTail:
    """New text at the end of a file that a worker writes."""

    def __init__(self, path: Path, at_end: bool = False):
        self.path = path
        self._fd: int | None = None
        self._close: Callable[[], Any] = lambda: None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a chunk may end within a character
        self._skip = path.stat().st_size if at_end and path.exists() else 0

    def texts(self) -> Iterator[str]:
        """What was added since the last call, in pieces; not what is being added meanwhile, which may never end."""
        if self._fd is None:
            try:
                self._fd = os.open(self.path, os.O_RDONLY)
            except OSError:
                return
            self._close = finalizer = weakref.finalize(self, os.close, self._fd)
            finalizer.atexit = False  # the program may end workers at exit, and shows then what they have printed
            os.lseek(self._fd, self._skip, os.SEEK_SET)
        left = os.fstat(self._fd).st_size - os.lseek(self._fd, 0, os.SEEK_CUR)
        while left > 0 and (chunk := os.read(self._fd, min(left, _CHUNK_BYTES))):
            left -= len(chunk)
            if text := self._decoder.decode(chunk):
                yield text

    def close(self) -> None:
        self._close()
        self._fd = None
