"""Arrays: columns by name, or one array whose rows are the rows."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import numpy as np

from paceline.data.rows import Columns
from paceline.errors import ArgumentError

SINGLE = "data"
"""The column's name where there is one array."""
_SAMPLE = 1024


class NumpySource:
    def __init__(self, value: Any):
        self.columns = _columns_of(value)
        sizes = {name: len(array) for name, array in self.columns.items()}
        if len(set(sizes.values())) > 1:
            raise ArgumentError(f"dataset: the arrays have different numbers of rows: {sizes}.")
        self._size = next(iter(sizes.values()), 0)

    @staticmethod
    def takes(value: Any) -> bool:
        return isinstance(value, np.ndarray)

    def __len__(self) -> int:
        return self._size

    def take(self, indices: Any) -> Columns:
        return Columns({name: array[indices] for name, array in self.columns.items()}, len(indices))

    def column(self, name: str) -> Any:
        """All of it."""
        return self.columns[name]

    def column_names(self) -> list[str]:
        return list(self.columns)

    def fingerprint(self) -> str:
        return fingerprint_of(self.columns)

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "numpy",
            "num_rows": self._size,
            "columns": {name: f"{array.dtype}{list(array.shape[1:]) or ''}" for name, array in self.columns.items()},
        }

    def __getstate__(self) -> dict[str, Any]:
        """A mapped file stays a file: whoever gets it maps it again."""
        return {"size": self._size, "columns": {name: _as_mapped(array) for name, array in self.columns.items()}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._size = state["size"]
        self.columns = {
            name: np.memmap(**value) if isinstance(value, dict) else value for name, value in state["columns"].items()
        }


def fingerprint_of(columns: Mapping[str, Any]) -> str:
    """Of names, types and a sample of the values."""
    digest = blake2b(digest_size=16)
    for name, array in columns.items():
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        step = max(1, len(array) // _SAMPLE)
        digest.update(repr(array[::step].tolist()).encode() if array.dtype == object else array[::step].tobytes())
    return digest.hexdigest()


def _columns_of(value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return {
            str(name): np.asarray(array) if not isinstance(array, np.ndarray) else array
            for name, array in value.items()
        }
    if value.ndim == 0:
        raise ArgumentError("dataset: an array without dimensions has no rows.")
    if value.dtype.names:
        return {name: value[name] for name in value.dtype.names}
    return {SINGLE: value}


def _as_mapped(array: Any) -> Any:
    is_whole = isinstance(array, np.memmap) and array.filename is not None and array.flags.c_contiguous
    if not is_whole or (array.base is not None and isinstance(array.base, np.memmap)):  # a view has another beginning
        return np.asarray(array)
    return {
        "filename": str(array.filename),
        "dtype": array.dtype,
        "mode": "r",
        "offset": array.offset,
        "shape": array.shape,
    }
