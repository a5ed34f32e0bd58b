"""The safetensors layout: 8 bytes of header length, a JSON header, then the raw data of all arrays without
gaps.

Written out here rather than with the package of that name, because a checkpoint is filled in place from
memory that is laid out exactly as the file is, and so reaches the disk without a further copy.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.frameworks.base import Block

# The names every reader of the layout knows. Newer ones (C64, F8_E8M0 …) are left out on purpose: an older
# reader refuses a whole file for one name it does not know, but any reader opens raw U8.
ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
_MAX_HEADER_BYTES = 100_000_000  # the layout's own limit


@dataclass(frozen=True)
class Entry:
    """One array of a file: its place in the data that follows the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin


def lay_out(blocks: Mapping[str, Block]) -> dict[str, Entry]:
    """Places the blocks in a row, the widest types first, so that each is aligned without padding."""
    entries = {}
    offset = 0
    for key, block in sorted(blocks.items(), key=lambda item: -item[1].alignment):
        entries[key] = Entry(block.dtype, block.shape, offset, offset + block.num_bytes)
        offset += block.num_bytes
    return entries


def header_bytes(entries: Mapping[str, Entry]) -> bytes:
    header = {
        key: {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [entry.begin, entry.end]}
        for key, entry in entries.items()
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def parse_header(start: bytes, read: Callable[[int, int], bytes], file_bytes: int) -> tuple[dict[str, Entry], int]:
    """The entries of a file and where its data begins. `start` is its first 8 bytes; `read(offset,
    num_bytes)` gives more.

    Raises ValueError for anything that does not fit together, before any memory is set aside for it.
    """
    header_length = int.from_bytes(start, "little")
    data_begin = 8 + header_length
    if len(start) != 8 or header_length > _MAX_HEADER_BYTES or data_begin > file_bytes:
        raise ValueError(f"its header claims {header_length} bytes, but the file has {file_bytes}")
    header = json.loads(read(8, header_length))
    header.pop("__metadata__", None)
    return {key: _entry(key, fields, file_bytes - data_begin) for key, fields in header.items()}, data_begin


def _entry(key: str, fields: dict[str, Any], data_bytes: int) -> Entry:
    dtype, shape = fields["dtype"], tuple(fields["shape"])
    begin, end = fields["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
        raise ValueError(f"the array '{key}' has an impossible shape or place")
    if end > data_bytes or end - begin != math.prod(shape) * ITEM_BYTES[dtype]:
        raise ValueError(f"the array '{key}' does not fit its place in the file")
    return Entry(dtype, shape, begin, end)
