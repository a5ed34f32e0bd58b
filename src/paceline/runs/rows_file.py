"""`rows.bin`: which rows went into which step, frame by frame as the driver heard it.

    frame   length of the body (4 bytes) and its CRC-32 (4), little-endian, then the body
    body    "A" and a JSON document: an attempt begins; or
            "R", the attempt (4), the rank (4) and what it sent, as `data/row_codec.py` describes it

A driver that is killed can leave a torn frame at the end, which readers ignore and the next driver cuts off.
"""

import errno
import os
import stat
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.json_text import decode, encode
from paceline.regular_files import DOCUMENT_BYTES
from paceline.runs.durable import Appended, read_file

ROWS_FILE = "rows.bin"
FORMAT, VERSION = "paceline.rows", 1

_HEAD = struct.Struct("<II")
_SENDER = struct.Struct("<II")
_BEGIN, _ROWS = b"A", b"R"


class RowsFile(Appended):
    """The writer: the driver, and nobody else. As with lines, `flush` writes. OSError for anything but a file: what is
    not whole is cut off, and a link would have that done to somebody else's."""

    _flags = os.O_NOFOLLOW | os.O_NONBLOCK

    def __init__(self, path: Path):
        super().__init__(path)
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            self.close()
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))

    def append_begin(self, fields: Mapping[str, Any]) -> None:
        self._append(framed(_BEGIN + encode({"format": FORMAT, "version": VERSION, **fields})))

    def append_rows(self, attempt: int, rank: int, message: bytes) -> None:
        self._append(framed(_ROWS + _SENDER.pack(attempt, rank) + message))

    def _find_whole(self, end: int) -> int:
        """A damaged frame with whole ones after it was not torn: it stays, so that readers know of the damage."""
        place = whole = 0
        while place + _HEAD.size <= end:
            size, checksum = _HEAD.unpack(os.pread(self._fd, _HEAD.size, place))
            if not 0 < size <= min(end - place - _HEAD.size, DOCUMENT_BYTES):
                break
            place += _HEAD.size + size
            if zlib.crc32(os.pread(self._fd, size, place - size)) == checksum:
                whole = place
        return whole


def framed(body: bytes) -> bytes:
    return _HEAD.pack(len(body), zlib.crc32(body)) + body


@dataclass
class Content:
    """Of a rows file: how its attempts began, by number, and what each rank of each attempt sent, in order."""

    begins: dict[int, dict[str, Any]] = field(default_factory=dict)
    messages: list[tuple[int, int, bytes]] = field(default_factory=list)
    num_damaged: int = 0
    """Frames that do not read back. One that is cut off at the end is none: a killed driver leaves it."""


def read_rows_file(path: Path) -> Content | None:
    """None if there is none. Damage is counted; RunDamagedError if something else than a file is there."""
    data = read_file(path)
    if data is None:
        return None
    content = Content()
    for body in _bodies(memoryview(data)):
        if body is None or not _take(content, body):
            content.num_damaged += 1
    return content


def _bodies(data: memoryview) -> Iterator[bytes | None]:
    """None for one whose checksum is wrong."""
    place = 0
    while place + _HEAD.size <= len(data):
        size, checksum = _HEAD.unpack_from(data, place)
        place += _HEAD.size
        if size == 0 or size > DOCUMENT_BYTES:
            yield None  # where the next one begins cannot be known
            return
        if size > len(data) - place:
            return
        body = data[place : place + size]
        yield bytes(body) if zlib.crc32(body) == checksum else None
        place += size


def _take(content: Content, body: bytes) -> bool:
    """Whether it makes sense."""
    if body[:1] == _ROWS and len(body) >= 1 + _SENDER.size:
        attempt, rank = _SENDER.unpack_from(body, 1)
        content.messages.append((attempt, rank, body[1 + _SENDER.size :]))
        return True
    fields = decode(body[1:]) if body[:1] == _BEGIN else None
    if not isinstance(fields, dict) or (fields.get("format"), fields.get("version")) != (FORMAT, VERSION):
        return False
    number = fields.get("number")
    if isinstance(number, bool) or not isinstance(number, int):
        return False
    content.begins[number] = fields
    return True
