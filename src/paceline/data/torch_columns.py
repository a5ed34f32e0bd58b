"""What a map gives, taken apart into columns: tensors and arrays whose first dimension is the batch, lists with an item
for each row, in dicts and tuples; and put together again."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import numpy as np
import pyarrow as pa
import torch

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
        return np.dtype(self.dtype).itemsize if self.kind == "array" else torch_dtype(self.dtype).itemsize

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


def put_together(tree: Any, columns: list[Any]) -> Any:
    if isinstance(tree, int):
        return columns[tree]
    if "dict" in tree:
        return {key: put_together(one, columns) for key, one in tree["dict"]}
    return tuple(put_together(one, columns) for one in tree["tuple"])


def torch_dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise DataError(f"{name!r} is no dtype of this torch")
    return found
