"""Whether batches are the same in every bit, and what makes the rows of one dataset others than those of another."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from paceline.data.identity import identity_of
from paceline.data.rows import Columns, Rows, Samples


def is_same(one: Any, other: Any) -> bool:
    """Whether two batches are equal in every bit, NaN among them."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, torch.Tensor | np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and _has_same_bytes(one, other)
    return bool(one == other) or (one != one and other != other)


def _has_same_bytes(one: Any, other: Any) -> bool:
    return bool(np.array_equal(bytes_of(one), bytes_of(other)))


def bytes_of(values: Any) -> Any:
    """Of a tensor or an array, as a flat array, which may be its own memory."""
    if isinstance(values, np.ndarray):
        return np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return values.contiguous().reshape(-1).view(torch.uint8).numpy()


@dataclass
class RowsHash:
    """Of the rows of a dataset, as they come by. The same rows must come in the same pieces."""

    _digest: Any = field(default_factory=lambda: blake2b(digest_size=16))

    def add(self, rows: Rows) -> None:
        if isinstance(rows, Samples):
            for sample in rows.samples:
                self._add(sample)
        elif isinstance(rows, Columns):
            self._add(rows.columns)

    def hexdigest(self) -> str:
        return str(self._digest.hexdigest())

    def _add(self, value: Any) -> None:
        # Kind and length go before the content, so that no two values are written alike.
        if type(value) in (torch.Tensor, np.ndarray) and _is_bytes(value):
            self._write(f"{type(value).__name__} {value.dtype} {tuple(value.shape)}".encode())
            self._digest.update(bytes_of(value))
        elif isinstance(value, str | bytes):
            self._write(type(value).__name__.encode())
            self._write(value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value)
        elif type(value) in (bool, int, float, complex, type(None)):
            self._write(f"{type(value).__name__} {value!r}".encode())
        elif type(value) in (tuple, list):
            self._write(f"{type(value).__name__} {len(value)}".encode())
            for item in value:
                self._add(item)
        elif type(value) is dict:
            self._write(f"dict {len(value)}".encode())
            for key, item in value.items():
                self._add(key)
                self._add(item)
        else:
            self._write(identity_of(value).encode())

    def _write(self, content: bytes) -> None:
        self._digest.update(len(content).to_bytes(8, "little") + content)


def _is_bytes(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return bool(value.dtype != object)
    return bool(value.device.type == "cpu" and value.layout == torch.strided and not value.is_quantized)
