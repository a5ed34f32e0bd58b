"""Rows of prepared batches in an Arrow file, which is mapped into memory: any of them as the batch that the map would
have made of these rows.

What a map gives is taken apart into columns: tensors and arrays whose first dimension is the batch, lists with an item
for each row, in dicts and tuples. Every column is kept bit by bit, with its dtype and the shape of a row.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from paceline.data.torch_equal import bytes_of
from paceline.errors import DataError

_SCALARS: dict[type, Any] = {
    str: pa.large_string(),
    bytes: pa.large_binary(),
    bool: pa.bool_(),
    int: pa.int64(),
    float: pa.float64(),
}
_ARROW = {name: pa.type_for_alias(name) for name in ("int8", "int16", "int32", "int64", "uint8", "float32", "float64")}
"""Others are kept as bytes."""


@dataclass(frozen=True)
class Column:
    kind: str
    """tensor, array (numpy's), values (a list of text or numbers) or tensors (a list of them, of any shapes)"""
    dtype: str
    shape: tuple[int, ...] = ()
    """Of a row."""

    @property
    def row_bytes(self) -> int:
        return prod(self.shape) * self._item_bytes

    @property
    def _item_bytes(self) -> int:
        return np.dtype(self.dtype).itemsize if self.kind == "array" else _torch_dtype(self.dtype).itemsize

    def arrow_type(self) -> Any:
        if self.kind == "values":
            return next(kind for one, kind in _SCALARS.items() if one.__name__ == self.dtype)
        if self.kind == "tensors":
            return pa.struct([("shape", pa.list_(pa.int64())), ("data", pa.large_binary())])
        if self.row_bytes == 0:
            return pa.null()
        kind = _ARROW.get(self.dtype)
        width = prod(self.shape) if kind is not None else self.row_bytes
        return kind if kind is not None and self.shape == () else pa.list_(kind or pa.uint8(), width)


@dataclass(frozen=True)
class Layout:
    """How columns make a batch: `tree` has their numbers in the places of the tensors."""

    tree: Any
    columns: tuple[Column, ...]

    def as_json(self) -> str:
        return json.dumps({"tree": self.tree, "columns": [asdict(one) for one in self.columns]})

    @staticmethod
    def from_json(text: str) -> Layout:
        told = json.loads(text)
        columns = (Column(one["kind"], one["dtype"], tuple(one["shape"])) for one in told["columns"])
        return Layout(told["tree"], tuple(columns))

    def schema(self) -> Any:
        fields = [pa.field(f"c{number}", one.arrow_type()) for number, one in enumerate(self.columns)]
        return pa.schema(fields, {"paceline": self.as_json()})


def taken_apart(batch: Any, num_rows: int) -> tuple[Layout, list[Any]]:
    """The layout of a batch, and its columns. DataError says what in it has no rows that could be kept."""
    parts: list[tuple[Column, Any]] = []
    tree = _taken_apart(batch, num_rows, parts, "what it returns")
    if not parts:
        raise DataError("what it returns has no tensors")
    return Layout(tree, tuple(column for column, _ in parts)), [values for _, values in parts]


def _taken_apart(value: Any, num_rows: int, parts: list[tuple[Column, Any]], where: str) -> Any:
    if type(value) is dict and all(type(key) is str for key in value):
        inner = [[key, _taken_apart(one, num_rows, parts, f"{where}[{key!r}]")] for key, one in value.items()]
        return {"dict": inner}
    if type(value) is tuple:
        return {"tuple": [_taken_apart(one, num_rows, parts, f"{where}[{n}]") for n, one in enumerate(value)]}
    parts.append((_column_of(value, num_rows, where), value))
    return len(parts) - 1


def _column_of(value: Any, num_rows: int, where: str) -> Column:
    if type(value) in (torch.Tensor, np.ndarray):
        if value.ndim == 0 or len(value) != num_rows:
            raise DataError(
                f"{where} has the shape {tuple(value.shape)}; expected a row for each of {num_rows} that it got"
            )
        shape = tuple(value.shape[1:])
        if type(value) is torch.Tensor:
            _check_plain(value, where)
            return Column("tensor", str(value.dtype).removeprefix("torch."), shape)
        if value.dtype.kind not in "biufc":
            raise DataError(f"{where} is an array of {value.dtype}")
        return Column("array", value.dtype.name if value.dtype.isnative else value.dtype.str, shape)
    if type(value) is list and len(value) == num_rows:
        return _column_of_list(value, where)
    raise DataError(f"{where} is a {type(value).__name__}; expected tensors, arrays or lists with an item for each row")


def _column_of_list(items: list[Any], where: str) -> Column:
    kinds = {type(one) for one in items if one is not None}
    if len(kinds) == 1 and (kind := kinds.pop()) in _SCALARS:
        return Column("values", kind.__name__)
    if items and all(type(one) is torch.Tensor for one in items) and len({one.dtype for one in items}) == 1:
        for one in items:
            _check_plain(one, where)
        return Column("tensors", str(items[0].dtype).removeprefix("torch."))
    raise DataError(f"{where} is a list of things that are not all text, numbers or tensors of one kind")


def _check_plain(tensor: torch.Tensor, where: str) -> None:
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_quantized or tensor.requires_grad:
        raise DataError(
            f"{where} is on {tensor.device}, sparse, quantized or requires gradients; expected plain tensors"
        )


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
        return _put_together(self._layout.tree, columns)

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
        return torch.from_numpy(made).reshape(-1).view(_torch_dtype(column.dtype)).reshape(shape)

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
    return flat.view(_torch_dtype(dtype)).reshape(item["shape"])


def _put_together(tree: Any, columns: list[Any]) -> Any:
    if isinstance(tree, int):
        return columns[tree]
    if "dict" in tree:
        return {key: _put_together(one, columns) for key, one in tree["dict"]}
    return tuple(_put_together(one, columns) for one in tree["tuple"])


def _torch_dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise DataError(f"{name!r} is no dtype of this torch")
    return found
