"""Files that are whole or not there: atomic replacement for documents, appends of whole lines for logs."""

import errno
import os
import sys
import threading
from collections import deque
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

from paceline.errors import RunDamagedError
from paceline.json_text import decode, encode_line
from paceline.regular_files import DOCUMENT_BYTES, UnreadableFileError, read_regular

_BLOCK_BYTES = 65_536
_MOST_LINES_BYTES = 4 * 2**30  # they are held in memory several times over


def write_atomic(path: Path | str, data: bytes, durable: bool = True, mode: int | None = None) -> None:
    """Replaces `path` by `data`: a reader sees the old file or the new one, also when this process is killed.

    With `durable` also when the machine crashes. `mode` is who may read and write it, where that is not as for any new
    file. If storage refuses: OSError, and nothing is left behind.
    """
    directory, name = os.path.split(path)
    beside = os.path.join(directory, f".{name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            if mode is not None:
                os.fchmod(fd, mode)
            _write_all(fd, data)
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(beside, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(beside)
        raise
    if durable:
        _sync_directory(directory or ".")


def _write_all(fd: int, data: bytes) -> None:
    num_written = os.write(fd, data)
    while num_written < len(data):
        num_written += os.write(fd, data[num_written:])


def _sync_directory(directory: str) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems have no such thing
            raise
    finally:
        os.close(fd)


class Appended:
    """Appends whole pieces, such as lines, to a file that has this one writer; any thread may append and flush.

    `append` only buffers. `flush` hands everything to the kernel in one write, so what was flushed survives a
    kill of this process. When storage refuses, the file is cut back to its last whole piece, the pieces that
    did not fit are dropped and counted in `num_lost`, and OSError is raised; the next flush starts afresh. The
    same goes for all pieces that come after somebody has deleted the file.
    """

    _flags = 0
    """For opening it, besides what is needed to append."""

    def __init__(self, path: Path | str):
        self.path = path
        self.num_lost = 0
        self._pending: deque[bytes] = deque()
        self._lock = threading.Lock()
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | self._flags, 0o666)
        self._is_torn = True  # until looked at: an earlier writer may have been killed inside a piece

    def __len__(self) -> int:
        """The number of pieces that wait for a flush."""
        return len(self._pending)

    def _append(self, piece: bytes) -> None:
        if self._fd >= 0:  # what comes after close has nowhere to go
            self._pending.append(piece)

    def flush(self) -> None:
        with self._lock:
            if self._fd < 0 or not self._pending:
                return
            lines = list(self._pending)
            data = b"".join(lines)
            start = sys.maxsize  # so that nothing counts as written if not even the size can be read
            try:
                start = self._end_of_whole()
                self._is_torn = True  # and stays so if anything, a Ctrl-C too, cuts the write short
                _write_all(self._fd, data)
                self._is_torn = False
            except OSError:
                self.num_lost += len(lines) - self._count_written(lines, start)
                self._drop(len(lines))
                raise
            # Lines leave the buffer after they were written: a Ctrl-C in between repeats some and loses none.
            self._drop(len(lines))

    def sync(self) -> None:
        """Makes what was flushed survive a crash of the machine."""
        with self._lock:
            if self._fd >= 0:
                os.fdatasync(self._fd)

    def close(self) -> None:
        """Flushes and closes; closed even if the flush raises. Idempotent."""
        try:
            self.flush()
        finally:
            with self._lock:
                fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)

    def _drop(self, num_lines: int) -> None:
        for _ in range(num_lines):
            self._pending.popleft()

    def _count_written(self, lines: list[bytes], start: int) -> int:
        try:
            num_bytes = self._end_of_whole() - start
        except OSError:
            return 0
        return sum(end <= num_bytes for end in accumulate(map(len, lines)))

    def _end_of_whole(self) -> int:
        """The size of the file, which is first cut back to its last whole piece if a write was not completed."""
        found = os.fstat(self._fd)
        if found.st_nlink == 0:  # the kernel would take it all, and nobody could ever read it
            raise FileNotFoundError(errno.ENOENT, "it was deleted", str(self.path))
        end = found.st_size
        if not self._is_torn:
            return end
        whole = self._find_whole(end)
        if whole < end:
            os.ftruncate(self._fd, whole)
        self._is_torn = False
        return whole

    def _find_whole(self, end: int) -> int:
        """Where the last whole piece ends, of a file of that size."""
        raise NotImplementedError  # abstract


class JsonLines(Appended):
    """The pieces are JSON values, each on a line."""

    def append(self, obj: Any) -> None:
        self._append(encode_line(obj))

    def _find_whole(self, end: int) -> int:
        for block in range((end - 1) // _BLOCK_BYTES, -1, -1):
            newline = os.pread(self._fd, _BLOCK_BYTES, block * _BLOCK_BYTES).rfind(b"\n")
            if newline >= 0:
                return block * _BLOCK_BYTES + newline + 1
        return 0


def read_json_lines(path: Path | str) -> list[dict[str, Any]]:
    """The objects of a JSON lines file; a torn last line is ignored, and a file that is missing has none.

    A damaged line in the middle (a disk that lost a block) is left out too: the others are worth reading.
    RunDamagedError if something else than a file is there, or one that cannot be read.
    """
    data = read_file(path, _MOST_LINES_BYTES) or b""
    whole = data[: data.rfind(b"\n") + 1]
    objects = (decode(line) for line in whole.split(b"\n"))
    return [obj for obj in objects if isinstance(obj, dict)]


def read_json(path: Path | str) -> dict[str, Any] | None:
    """The object in a JSON file; None where there is no file, or no whole object in it. RunDamagedError as above."""
    obj = decode(read_file(path, DOCUMENT_BYTES) or b"")
    return obj if isinstance(obj, dict) else None


def read_file(path: Path | str, most_bytes: int = _MOST_LINES_BYTES, root: Path | None = None) -> bytes | None:
    """The content of a file of a run folder, None if it is not there. See `open_regular` for what is not read."""
    try:
        return read_regular(path, most_bytes, root)
    except FileNotFoundError:
        return None
    except UnreadableFileError as error:
        raise RunDamagedError(
            f"{path} cannot be read: {error.strerror}. The other files of the run can be; mend or remove this one."
        ) from error
