"""Rows as torch's tensors."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from paceline.data.rows import Columns, as_numpy
from paceline.errors import ArgumentError, DataError

_NOT_TORCHS = {np.dtype("uint16"): np.int32, np.dtype("uint32"): np.int64, np.dtype("uint64"): np.int64}

FEATURES, LABEL = "features", "label"


def tensors(rows: Columns) -> dict[str, Any]:
    """By column. Text and bytes, of which there are no tensors, are lists."""
    return {name: _tensor(name, column) for name, column in rows.columns.items()}


def collated(samples: Sequence[Any]) -> Any:
    return default_collate(list(samples)) if len(samples) else []


def _tensor(name: str, column: Any) -> Any:
    if not isinstance(column, np.ndarray) and _is_text(column):
        return column.to_pylist()
    array = as_numpy(name, column)
    if array.dtype.kind in "US":
        return array.tolist()
    if array.dtype == object:
        raise DataError(
            f"The column {name!r} holds lists of different lengths, which are no tensor: give collate_fn, or make them "
            "equally long with .map()."
        )
    array = array.astype(_NOT_TORCHS.get(array.dtype, array.dtype), copy=False)
    if array.dtype.kind in "mM":
        array = array.astype("datetime64[ns]" if array.dtype.kind == "M" else "timedelta64[ns]").view(np.int64)
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _is_text(column: Any) -> bool:
    import pyarrow as pa

    kind = column.type
    return any(
        test(kind)
        for test in (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    )


class FeaturesAndLabel:
    """Makes of each block of rows one matrix of features and one column of labels, so that a batch is a slice of two
    arrays, however many columns there are. Without a label it is the matrix alone. Columns of one type keep it, others
    become float32, and so do those of float64, which models seldom are."""

    def __init__(self, features: Sequence[str] | None, label: str | None, dtype: Any, is_last: bool = False):
        self._features, self._label, self._dtype, self._is_last = features, label, dtype, is_last

    def __call__(self, rows: Columns) -> Columns:
        target = list(rows.columns)[-1] if self._is_last else self._label
        names = self._features or [name for name in rows.columns if name != target]
        if not names:
            raise ArgumentError(
                f"to_torch(): the only column, {target!r}, is the label. Say label_column=None if there is none."
            )
        chosen = rows.select([*names, *([target] if target else [])])
        made = {FEATURES: self._matrix({name: chosen.columns[name] for name in names})}
        if target:
            label = as_numpy(target, chosen.columns[target])
            made[LABEL] = label.astype(np.float32) if label.dtype == np.float64 else label
        return Columns(made, len(rows), (*names, *([target] if target else [])))

    def _matrix(self, columns: dict[str, Any]) -> Any:
        arrays = {name: as_numpy(name, column) for name, column in columns.items()}
        for name, array in arrays.items():
            if array.dtype.kind not in "biuf":
                raise ArgumentError(
                    f"to_torch(): the column {name!r} holds {array.dtype} values, which are no features. Name the "
                    "feature_columns, or make numbers of it with .map()."
                )
        if len(arrays) == 1:
            [array] = arrays.values()
            if array.ndim > 1:
                return array if self._dtype is None else array.astype(self._dtype, copy=False)
        width = sum(array.shape[1] if array.ndim > 1 else 1 for array in arrays.values())
        kinds = {array.dtype for array in arrays.values()}
        kind = self._dtype or (next(iter(kinds)) if len(kinds) == 1 and kinds != {np.dtype(float)} else np.float32)
        size = len(next(iter(arrays.values()), ()))
        made, place = np.empty((size, width), kind), 0
        for array in arrays.values():
            flat = array.reshape(size, -1)
            made[:, place : place + flat.shape[1]] = flat
            place += flat.shape[1]
        return made


def pair(rows: Columns) -> Any:
    """What `FeaturesAndLabel` has made, as (features, label)."""
    made = tensors(rows)
    return (made[FEATURES], made[LABEL]) if LABEL in made else made[FEATURES]
