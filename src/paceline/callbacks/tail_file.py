"""A file that grows at its end, and keeps what it had when the disk does not take more."""

import os
from contextlib import suppress
from pathlib import Path


class TailFile:
    """Starts with `content`; every `replace_tail` changes the last bytes and adds more, in one write.

    With `num_kept_bytes`, so much of the file that is there stays before `content`, and what came after it goes.

    When the write fails half-way (a full disk), the former tail and size are restored before OSError is
    raised, so the file still holds what the last successful call left. It has one writer; readers may come at
    any time.
    """

    def __init__(self, path: Path, content: bytes = b"", num_kept_bytes: int = 0):
        self.path = path
        self._size = num_kept_bytes
        anew = 0 if num_kept_bytes else os.O_TRUNC
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | anew, 0o666)
        try:
            # First written, then cut: a whole file that is continued is whole for its readers at any time.
            self.replace_tail(b"", content)
            os.ftruncate(self._fd, self._size)
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
