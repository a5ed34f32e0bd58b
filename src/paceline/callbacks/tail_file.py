"""A file that grows at its end, and keeps what it had when the disk does not take more."""

import os
from contextlib import suppress
from pathlib import Path


class TailFile:
    """Starts with `content`; every `replace_tail` changes the last bytes and adds more, in one write.

    When the write fails half-way (a full disk), the former tail and size are restored before OSError is
    raised, so the file still holds what the last successful call left. It has one writer; readers may come at
    any time.
    """

    def __init__(self, path: Path, content: bytes = b""):
        self.path = path
        self._size = 0
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            self.replace_tail(b"", content)
        except BaseException:
            self.close()
            raise

    def replace_tail(self, tail: bytes, data: bytes) -> None:
        """Puts `data` where `tail`, the present end of the file, stands; `data` is not the shorter one."""
        start = self._size - len(tail)
        try:
            self._write(start, data)
        except BaseException as error:
            # The blocks under the tail are allocated already, so putting it back needs no space.
            with suppress(OSError):
                os.pwrite(self._fd, tail, start)
                os.ftruncate(self._fd, self._size)
            if isinstance(error, OSError):
                raise OSError(error.errno, error.strerror, str(self.path)) from error
            raise
        self._size = start + len(data)

    def move_to(self, path: Path) -> None:
        """Takes the place of another file in the same folder, whole or not at all, and goes on from there."""
        os.fsync(self._fd)
        os.replace(self.path, path)
        self.path = path

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _write(self, start: int, data: bytes) -> None:
        num_written = os.pwrite(self._fd, data, start)
        while num_written < len(data):  # a short write: the disk became full, and the next call says so
            num_written += os.pwrite(self._fd, data[num_written:], start + num_written)
