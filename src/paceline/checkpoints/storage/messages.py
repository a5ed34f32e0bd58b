"""Files on their way between a worker and the driver, cut and bundled into messages of a bounded size: a piece is the
name of a file and its next bytes.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from paceline.checkpoints.content.files import CHUNK_BYTES, SourceFile

Piece = tuple[str, bytes]


def messages(files: Sequence[SourceFile]) -> Iterator[list[Piece]]:
    """The content of all files, in order: many small ones make one message, a large one makes several."""
    pieces: list[Piece] = []
    num_bytes = 0
    for file in files:
        pieces.append((file.name, b""))  # an empty file is one, too
        for chunk in file.chunks():
            if num_bytes + len(chunk) > CHUNK_BYTES:
                yield pieces
                pieces, num_bytes = [], 0
            pieces.append((file.name, bytes(chunk)))
            num_bytes += len(chunk)
    yield pieces


def read_message(
    read: Callable[[str, int, int], bytes], files: Sequence[str], offset: int
) -> tuple[list[Piece], int, int]:
    """The next message from the content of `files`, of which the first was read up to `offset` already. With it, how
    many of the files are now read to their end, and the offset in the one after these. `read(file, offset, num_bytes)`
    gives less than that only at the end of a file."""
    pieces: list[Piece] = []
    num_done, room = 0, CHUNK_BYTES
    while num_done < len(files) and room > 0:
        data = read(files[num_done], offset, room)
        pieces.append((files[num_done], data))
        num_done, offset = (num_done + 1, 0) if len(data) < room else (num_done, offset + len(data))
        room -= len(data)
    return pieces, num_done, offset


def append(folder: Path, pieces: Sequence[Piece], sync: bool = False) -> None:
    """Adds the pieces to the files in `folder`. With `sync`, large ones go to disk at once, so that what is synced at
    the end never takes long."""
    for name, data in pieces:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab") as file:
            file.write(data)
            file.flush()
            if sync and len(data) == CHUNK_BYTES:
                os.fdatasync(file.fileno())
