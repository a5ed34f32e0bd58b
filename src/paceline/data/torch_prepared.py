"""Rows of prepared batches in an Arrow file, which is mapped into memory: any of them as the batch that the map would
have made of these rows. Every column is kept bit by bit, with its dtype and the shape of a row.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from paceline.data.torch_columns import Column, Layout, put_together, taken_apart, torch_dtype
from paceline.data.torch_equal import bytes_of
from paceline.errors import DataError

# --- writing ----------------------------------------------------------------------------------------------------------


class Writer:
    """Writes batches to a file, many rows in one block. Counts and sums up what is written."""

    def __init__(self, path: Path, block_bytes: int = 32 * 2**20):
        self._file, self._block_bytes = open(path, "wb"), block_bytes  # noqa: SIM115 - `close` does
        self._sink = _Counted(self._file)
        self._arrow: Any = None
        self._pending: list[Any] = []
        self._layout: Layout | None = None
        self.num_rows = 0

    @property
    def layout(self) -> Layout | None:
        return self._layout

    @property
    def crc32(self) -> int:
        return self._sink.crc32

    @property
    def num_bytes(self) -> int:
        return self._sink.num_bytes

    def add(self, batch: Any, num_rows: int) -> None:
        """DataError if it cannot be kept, or is another kind of batch than those before."""
        layout, columns = taken_apart(batch, num_rows)
        if self._layout is None:
            self._layout = layout
            self._arrow = pa.ipc.new_file(self._sink, layout.schema())
        if layout != self._layout:
            raise DataError(f"it returns batches of different kinds: {_difference(self._layout, layout)}")
        try:
            arrays = [_arrow_array(*one) for one in zip(layout.columns, columns, strict=True)]
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, UnicodeError) as error:
            raise DataError(f"it returns values that Arrow cannot hold: {error}") from error
        self._pending.append(pa.record_batch(arrays, schema=layout.schema()))
        self.num_rows += num_rows
        if sum(one.nbytes for one in self._pending) >= self._block_bytes:
            self._write()

    def close(self) -> None:
        """Writes what is left, and waits until the disk has it. Closed even if that raises."""
        try:
            if self._arrow is not None:
                self._write()
                self._arrow.close()
            self._file.flush()
            os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def abandon(self) -> None:
        self._file.close()

    def _write(self) -> None:
        pending, self._pending = self._pending, []
        if pending:
            whole = pa.Table.from_batches(pending).combine_chunks()
            for one in whole.to_batches():
                self._arrow.write_batch(one)


class _Counted:
    """A file for Arrow to write to."""

    closed = False

    def __init__(self, file: Any):
        self._file, self.num_bytes, self.crc32 = file, 0, 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._file.write(view)
        self.num_bytes, self.crc32 = self.num_bytes + len(view), zlib.crc32(view, self.crc32)
        return len(view)

    def tell(self) -> int:
        return self.num_bytes

    def flush(self) -> None:
        self._file.flush()


def _difference(one: Layout, other: Layout) -> str:
    if one.tree != other.tree:
        return f"{one.tree} and {other.tree}"
    pairs = [(a, b) for a, b in zip(one.columns, other.columns, strict=True) if a != b]
    return " and ".join(f"{column.dtype} of shape {list(column.shape)} in a row" for column in pairs[0])


def _arrow_array(column: Column, values: Any) -> Any:
    kind = column.arrow_type()
    if column.kind == "values":
        return pa.array(values, kind)
    if column.kind == "tensors":
        items = [{"shape": list(one.shape), "data": bytes_of(one).tobytes()} for one in values]
        return pa.array(items, kind)
    num_rows = len(values)
    if column.row_bytes == 0:
        return pa.nulls(num_rows)
    inner = kind.value_type if pa.types.is_fixed_size_list(kind) else kind
    data = pa.py_buffer(bytes_of(values))
    flat = pa.Array.from_buffers(inner, data.size * 8 // inner.bit_width, [None, data])
    return flat if inner is kind else pa.FixedSizeListArray.from_arrays(flat, kind.list_size)


# --- reading ----------------------------------------------------------------------------------------------------------


class PreparedRows:
    """Opened where it is used: it travels as its path."""

    def __init__(self, path: Path):
        self._path = path
        self._open()

    def _open(self) -> None:
        self._reader = pa.ipc.open_file(pa.memory_map(str(self._path)))
        self._layout = Layout.from_json(self._reader.schema.metadata[b"paceline"].decode())
        self._blocks = [self._reader.get_batch(number) for number in range(self._reader.num_record_batches)]
        self._ends = np.cumsum([len(block) for block in self._blocks])
        self._views: dict[tuple[int, int], Any] = {}

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def gather(self, numbers: Sequence[int]) -> Any:
        """The batch of these rows, in this order. It shares no memory with the file."""
        wanted = np.asarray(numbers, np.int64)
        blocks = np.searchsorted(self._ends, wanted, side="right")
        inside = wanted - np.concatenate([[0], self._ends])[blocks]
        columns = [self._column(number, blocks, inside) for number in range(len(self._layout.columns))]
        return put_together(self._layout.tree, columns)

    def _column(self, number: int, blocks: Any, inside: Any) -> Any:
        column = self._layout.columns[number]
        if column.kind in ("values", "tensors"):
            pairs = zip(blocks.tolist(), inside.tolist(), strict=True)
            items = [self._blocks[block].column(number)[place].as_py() for block, place in pairs]
            return items if column.kind == "values" else [_tensor_of(column.dtype, one) for one in items]
        made = np.empty((len(blocks), column.row_bytes), np.uint8)
        if column.row_bytes:
            for block in np.unique(blocks):
                places = np.flatnonzero(blocks == block)
                made[places] = self._view(int(block), number, column)[inside[places]]
        shape = (len(blocks), *column.shape)
        if column.kind == "array":
            return made.reshape(-1).view(column.dtype).reshape(shape)
        return torch.from_numpy(made).reshape(-1).view(torch_dtype(column.dtype)).reshape(shape)

    def _view(self, block: int, number: int, column: Column) -> Any:
        """The bytes of a column in a block, a line for each row. It is in the file's own memory."""
        if (block, number) not in self._views:
            data = self._blocks[block].column(number).buffers()[-1]
            num_rows = len(self._blocks[block])
            flat = np.frombuffer(data, np.uint8, num_rows * column.row_bytes)
            self._views[block, number] = flat.reshape(num_rows, column.row_bytes)
        return self._views[block, number]

    def __reduce__(self) -> Any:
        return PreparedRows, (self._path,)


def _tensor_of(dtype: str, item: dict[str, Any]) -> torch.Tensor:
    flat = torch.frombuffer(bytearray(item["data"]), dtype=torch.uint8) if item["data"] else torch.empty(0).byte()
    return flat.view(torch_dtype(dtype)).reshape(item["shape"])
