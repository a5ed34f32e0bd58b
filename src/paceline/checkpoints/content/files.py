"""The files of a checkpoint on their way to storage, from memory or from disk, in chunks that are never
copied again.
"""

import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

CHUNK_BYTES = 8 * 2**20


@dataclass(frozen=True)
class FileRecord:
    """What the manifest knows about a file, enough to tell whether it is still what was written."""

    name: str
    num_bytes: int
    crc32: int


class SourceFile(Protocol):
    """A file to be written: its name inside the checkpoint ("/" between folders), and its content, readable
    repeatedly. A chunk is good until the next one is asked for: the memory under it may be used again.
    """

    @property
    def name(self) -> str: ...

    def chunks(self) -> Iterator[memoryview]: ...


def _nobody() -> None:
    """Nobody wants to know."""


@dataclass(frozen=True)
class MemoryFile:
    """`moved` is called whenever some of it has been read, and what was read before is where it should be."""

    name: str
    parts: Sequence[bytes | memoryview]
    moved: Callable[[], None] = field(default=_nobody, compare=False)

    def chunks(self) -> Iterator[memoryview]:
        for part in self.parts:
            view = memoryview(part)
            for begin in range(0, len(view), CHUNK_BYTES):
                yield view[begin : begin + CHUNK_BYTES]
                self.moved()


@dataclass(frozen=True)
class DiskFile:
    """A file in a workspace of ours, which nobody changes any more: storage may link to it instead of
    copying. `moved` is as above.
    """

    name: str
    path: Path
    moved: Callable[[], None] = field(default=_nobody, compare=False)

    def chunks(self) -> Iterator[memoryview]:
        buffer = memoryview(bytearray(CHUNK_BYTES))
        with open(self.path, "rb", buffering=0) as file:
            while num_bytes := file.readinto(buffer):
                yield buffer[:num_bytes]
                self.moved()


def record_of(file: SourceFile) -> FileRecord:
    """Reads the file once. CRC-32 finds every torn or bit-flipped file we care for, and leaves the GIL alone
    meanwhile.
    """
    crc32 = num_bytes = 0
    for chunk in file.chunks():
        crc32 = zlib.crc32(chunk, crc32)
        num_bytes += len(chunk)
    return FileRecord(file.name, num_bytes, crc32)


def write_chunks(fd: int, file: SourceFile, sync_every_bytes: int) -> None:
    """Writes and fsyncs the file. On the way it syncs now and then, so that a checkpoint never fills the page
    cache with
    dirty pages, for which every other writer of the machine would then have to wait."""
    unsynced_bytes = 0
    for chunk in file.chunks():
        while chunk:
            chunk = chunk[os.write(fd, chunk) :]
        unsynced_bytes += CHUNK_BYTES
        if unsynced_bytes >= sync_every_bytes:
            os.fdatasync(fd)
            unsynced_bytes = 0
    os.fsync(fd)
