"""Rows as torch's tensors."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from paceline.data.formats import column_of
from paceline.data.rows import Columns, as_numpy, unwrapped
from paceline.errors import ArgumentError, DataError

_NOT_TORCHS = {np.dtype("uint16"): np.int32, np.dtype("uint32"): np.int64, np.dtype("uint64"): np.int64}

FEATURES, LABEL = "features", "label"


def tensors(rows: Columns, is_collated: bool = False) -> dict[str, Any]:
    """By column. Text and bytes, of which there are no tensors, are lists. So are lists of different lengths, if
    somebody makes something of them: a list of tensors, to be padded for example."""
    return {name: _tensor(name, column, is_collated) for name, column in rows.columns.items()}


def collated(samples: Sequence[Any]) -> Any:
    return default_collate(list(samples)) if len(samples) else []


def _tensor(name: str, column: Any, is_collated: bool) -> Any:
    if isinstance(column, np.ndarray) and column.dtype.kind in "SU":
        return column.tolist()
    if isinstance(column, np.ndarray) and column.dtype == object:
        column = column_of(column, f"column {name!r}")
    if not isinstance(column, np.ndarray):
        column = _decoded(column)
        if _is_text(column):
            return column.to_pylist()
        if _is_list(column) and not is_collated:
            raise DataError(
                f"The column {name!r} holds lists of different lengths, which are no tensor: give collate_fn to "
                "iter_torch_batches(), which gets a list of tensors, or make them equally long with .map()."
            )
        if _is_list(column):
            return [_one_of(name, value) for value in column]
    array = as_numpy(name, column)
    if array.dtype.kind in "US":
        return array.tolist()
    if array.dtype == object:
        kind = getattr(column, "type", "object")
        raise DataError(
            f"The column {name!r} holds {kind} values, of which there are no tensors: leave it out with "
            ".select_columns(), or make numbers of it with .map()."
        )
    return _of_array(array)


def _one_of(name: str, value: Any) -> Any:
    """A list of a column of lists, which may hold lists in turn."""
    if value.values is None:
        raise DataError(f"The column {name!r} has a missing value where others have a list: fill it in with .map().")
    return _tensor(name, unwrapped(value.values), is_collated=True)


def _of_array(array: Any) -> Any:
    array = array.astype(_NOT_TORCHS.get(array.dtype, array.dtype), copy=False)
    if array.dtype.kind in "mM":
        array = array.astype("datetime64[ns]" if array.dtype.kind == "M" else "timedelta64[ns]").view(np.int64)
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _decoded(column: Any) -> Any:
    """Categories as what they stand for, which is text more often than not."""
    import pyarrow as pa

    return column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column


def _is_list(column: Any) -> bool:
    import pyarrow as pa

    kind = column.type
    return any(test(kind) for test in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list))


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
            if label.dtype.kind not in "biufcM":
                raise ArgumentError(
                    f"to_torch(): the label column {target!r} holds {label.dtype} values, of which there are no "
                    "tensors. Name another label_column, or make numbers of it with .map()."
                )
            made[LABEL] = label.astype(np.float32) if label.dtype == np.float64 else label
        return Columns(made, len(rows), (*names, *([target] if target else [])))

    def _matrix(self, columns: dict[str, Any]) -> Any:
        arrays = {name: as_numpy(name, column) for name, column in columns.items()}
        for name, array in arrays.items():
            if array.dtype.kind not in "biuf":
                raise ArgumentError(
                    f"to_torch(): the column {name!r} holds {array.dtype} values, which are no features. Name the "
                    "feature_columns, make numbers of it with .map(), or read all columns by name with "
                    "iter_torch_batches()."
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
