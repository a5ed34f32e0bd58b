"""Files of JSON lines that somebody else has written, and may be writing: of any size, a block at a time."""

import os
from collections.abc import Iterable, Iterator
from typing import IO, Any

from paceline.errors import RunDamagedError
from paceline.json_text import decode
from paceline.regular_files import UnreadableFileError, open_regular

_BLOCK_BYTES = 1 << 20
_LONGEST_LINE_BYTES = 64 << 20
_SAMPLE_BYTES, _END_BYTES = 64 << 10, 256 << 10


def read_lines(path: str) -> Iterator[dict[str, Any]]:
    """The objects of a JSON lines file of any size, a block at a time. A torn last line is left out."""
    return JsonLinesReader(path).read()


class JsonLinesReader:
    """Reads on where it has left off, so that a file that grows is read once."""

    def __init__(self, path: str):
        self._path = path
        self._place = 0

    def read(self) -> Iterator[dict[str, Any]]:
        """Up to the present end; a line that is not whole yet comes the next time. RunDamagedError if it is no file."""
        file = _opened(self._path)
        if file is None:
            return
        with file:
            if os.fstat(file.fileno()).st_size < self._place:  # it was replaced by another
                self._place = 0
            file.seek(self._place)
            pieces: list[bytes] = []  # of a line that goes on; joined once, or a long one would take for ever
            while block := file.read(_BLOCK_BYTES):
                first, newline, rest = block.partition(b"\n")
                pieces.append(first)
                if not newline:
                    if sum(map(len, pieces)) > _LONGEST_LINE_BYTES:
                        return
                    continue
                *lines, last = rest.split(b"\n")
                whole = [b"".join(pieces), *lines]
                self._place += sum(map(len, whole)) + len(whole)
                pieces = [last]
                yield from _objects(whole)


def read_last_lines(path: str, most_bytes: int) -> list[dict[str, Any]]:
    """The objects at the end of a file, as many as are in so many bytes."""
    file = _opened(path)
    if file is None:
        return []
    with file:
        start = max(0, os.fstat(file.fileno()).st_size - most_bytes)
        lines = os.pread(file.fileno(), most_bytes, start).split(b"\n")
    return list(_objects(lines[1 if start else 0 : -1]))


def sample_lines(path: str, num: int) -> Iterator[dict[str, Any]]:
    """Of a large file its first line, so many that are evenly spread, and those at its end."""
    file = _opened(path)
    if file is None:
        return
    with file:
        fd = file.fileno()
        end = max(0, os.fstat(fd).st_size - _END_BYTES)
        yield from _objects(os.pread(fd, _SAMPLE_BYTES, 0).split(b"\n")[:1])
        for number in range(1, num):
            lines = os.pread(fd, _SAMPLE_BYTES, end * number // num).split(b"\n")
            yield from _objects(lines[1:-1][:1])
        yield from _objects(os.pread(fd, _END_BYTES, end).split(b"\n")[1 if end else 0 : -1])


def _objects(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    return (value for line in lines if isinstance(value := decode(line), dict))


def _opened(path: str) -> IO[bytes] | None:
    """None if there is none (yet)."""
    try:
        return open(open_regular(path), "rb", buffering=0)
    except FileNotFoundError:
        return None
    except UnreadableFileError as error:
        raise RunDamagedError(f"{path} cannot be read: {error.strerror}.") from error
