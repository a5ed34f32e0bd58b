"""The content of a checkpoint: `state.json`, the tree of the user's values, and `arrays.safetensors`, their
raw data.

Saving happens in two steps, so that training waits for the first only: `snapshot` copies the arrays into
memory that is already laid out as the file will be; writing that memory out can then take its time. Loading
runs no code from the files.
"""

import json
import mmap
import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoints.content.files import CHUNK_BYTES, FileRecord, MemoryFile
from paceline.checkpoints.content.tensorfile import Entry, header_bytes, lay_out, parse_header
from paceline.checkpoints.content.tree import Decoder, Encoder
from paceline.checkpoints.manifest import damaged
from paceline.errors import PacelineError
from paceline.frameworks.base import Block
from paceline.regular_files import open_regular

STATE_FILE = "state.json"
ARRAYS_FILE = "arrays.safetensors"
FILES_DIR = "files"


def rank_dir(rank: int) -> str:
    """The folder, inside a checkpoint, of what a rank has of its own."""
    return f"ranks/{rank}/"


class Buffers:
    """Memory that one snapshot after the other is copied into. It grows when it must, and never shrinks.

    Fresh memory costs more than the copy itself (the kernel zeroes every page of it), so it is kept. Whoever
    passes it to `snapshot` again must be done with the snapshot before.
    """

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None

    def take(self, num_bytes: int) -> memoryview:
        if num_bytes == 0:
            return memoryview(b"")
        if self._memory is None or len(self._memory) < num_bytes:
            self._memory = None  # before the larger one is made, not after: both may not fit
            self._memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                self._advise_huge_pages(self._memory)
        return memoryview(self._memory)[:num_bytes]

    @staticmethod
    def _advise_huge_pages(memory: mmap.mmap) -> None:
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel built without them
            return


@dataclass(frozen=True)
class Encoded:
    """A state whose values were all found fit for a checkpoint, and whose arrays are not copied yet."""

    tree: Any
    blocks: Mapping[str, Block]

    def snapshot(self, buffers: Buffers | None = None) -> "Snapshot":
        entries = lay_out(self.blocks)
        data = (buffers or Buffers()).take(sum(entry.num_bytes for entry in entries.values()))
        for key, entry in entries.items():
            if entry.num_bytes:
                self.blocks[key].copy_into(data[entry.begin : entry.end])
        return Snapshot(self.tree, entries, data)


@dataclass(frozen=True)
class Snapshot:
    """A state as it was at one moment, free of the objects it came from. An `ArrayReader` of itself."""

    tree: Any
    entries: Mapping[str, Entry]
    data: memoryview

    def files(self, folder: str = "") -> list[MemoryFile]:
        """`folder` is where they go inside the checkpoint: empty, or a path that ends with a slash."""
        text = json.dumps(self.tree, allow_nan=False, separators=(",", ":"))
        files = [MemoryFile(folder + STATE_FILE, [text.encode()])]
        if self.entries:
            files.append(MemoryFile(folder + ARRAYS_FILE, [header_bytes(self.entries), self.data]))
        return files

    def entry(self, key: str) -> Entry:
        return self.entries[key]

    def read_into(self, key: str, memory: memoryview) -> None:
        entry = self.entries[key]
        memory[:] = self.data[entry.begin : entry.end]


def encode(state: Mapping[str, Any]) -> Encoded:
    """Checks every value of a state. Raises CheckpointValueError, which names the place of a value that
    cannot be held.
    """
    encoder = Encoder()
    return Encoded(encoder.encode(dict(state)), encoder.blocks)


def decode(snapshot: Snapshot) -> dict[str, Any]:
    """The state back from memory, in new objects."""
    state: dict[str, Any] = Decoder(snapshot).decode(snapshot.tree)
    return state


def snapshot(state: Mapping[str, Any], buffers: Buffers | None = None) -> Snapshot:
    """Checks and copies a state. With `buffers` used before for a state of this size, nothing is allocated
    for arrays.
    """
    return encode(state).snapshot(buffers)


def copy_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state as saving it to disk and loading it would return it, without the disk. Nothing is shared with
    `state`.
    """
    return decode(snapshot(state))


def read_state(directory: Path, path: str, has_arrays: bool = True) -> dict[str, Any]:
    """Decodes the verified files in `directory`, of which the arrays are one or not. `path` is what the user calls the
    checkpoint, for errors."""
    try:
        with open(open_regular(directory / STATE_FILE), "rb") as file:
            tree = json.loads(file.read())
        with _ArraysFile(directory / ARRAYS_FILE if has_arrays else None) as arrays:
            state: dict[str, Any] = Decoder(arrays).decode(tree)
    except (PacelineError, FileNotFoundError, MemoryError):
        raise
    except Exception as error:
        # the checksums were right, so this is a file that no writer of ours has made
        raise damaged(path, STATE_FILE, f"it does not decode ({error!r})") from error
    if not isinstance(state, dict):
        raise damaged(path, STATE_FILE, "its outermost value is not a dict")
    return state


def verify(directory: Path, records: Iterable[FileRecord], path: str) -> None:
    """Reads every byte of the files, and raises CheckpointDamagedError for the first that is not what was
    written.

    FileNotFoundError for one that is gone: only the caller can know whether the whole checkpoint is.
    UnreadableFileError for what is no file of this directory.
    """
    buffer = memoryview(bytearray(CHUNK_BYTES))
    for record in records:
        crc32 = 0
        with open(open_regular(directory / record.name, directory), "rb", buffering=0) as file:
            num_bytes = os.fstat(file.fileno()).st_size
            if num_bytes != record.num_bytes:  # before it is read: one that was blown up takes for ever
                raise damaged(path, record.name, f"it has {num_bytes} bytes, but {record.num_bytes} were written")
            while count := file.readinto(buffer):
                crc32 = zlib.crc32(buffer[:count], crc32)
        if crc32 != record.crc32:
            raise damaged(path, record.name, "its checksum is not that of what was written")


class _ArraysFile:
    """The arrays of a checkpoint on disk, each read straight into the memory of the array it becomes."""

    def __init__(self, path: Path | None):
        """None: there are none."""
        self._path = path
        self._fd: int | None = None
        self._entries: dict[str, Entry] = {}
        self._data_begin = 0

    def __enter__(self) -> "_ArraysFile":
        if self._path is not None:
            self._fd = open_regular(self._path)
            size = os.fstat(self._fd).st_size
            self._entries, self._data_begin = parse_header(self._read(0, 8), self._read, size)
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd is not None:
            os.close(self._fd)

    def entry(self, key: str) -> Entry:
        return self._entries[key]

    def read_into(self, key: str, memory: memoryview) -> None:
        self._fill(memory, self._data_begin + self._entries[key].begin)

    def _read(self, offset: int, num_bytes: int) -> bytes:
        data = bytearray(num_bytes)
        self._fill(memoryview(data), offset)
        return bytes(data)

    def _fill(self, memory: memoryview, offset: int) -> None:
        if self._fd is None:
            raise ValueError("there is no file of arrays")
        while memory:
            count = os.preadv(self._fd, [memory], offset)
            if count == 0:
                raise ValueError("the file of arrays ends too early")
            memory, offset = memory[count:], offset + count
