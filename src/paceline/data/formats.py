"""Rows as users want them, and what users give back as rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from paceline.data.rows import Columns, Rows, Samples, as_numpy, from_arrow, to_arrow, unwrapped
from paceline.errors import ArgumentError, DataError

FORMATS = ("numpy", "pandas", "pyarrow", "torch")


def check_format(batch_format: str) -> str:
    if batch_format not in FORMATS:
        raise ArgumentError(f"batch_format={batch_format!r}: expected one of {', '.join(map(repr, FORMATS))}.")
    return batch_format


def to_batch(rows: Rows, batch_format: str, is_collated: bool = False) -> Any:
    """`is_collated`: a function of the user's makes something of it, which may have to pad what is not equally long."""
    if isinstance(rows, Samples):
        return _of_samples(rows, batch_format)
    assert isinstance(rows, Columns)
    return _torch(rows, is_collated) if batch_format == "torch" else _OF_COLUMNS[batch_format](rows)


def _of_samples(rows: Samples, batch_format: str) -> Any:
    if batch_format == "torch":
        from paceline.data.torch_batches import collated

        return collated(rows.samples)
    if batch_format == "numpy":
        return _stacked(rows.samples)
    raise DataError(
        f'batch_format="{batch_format}" needs columns, and a row of this dataset is a '
        f"{type(rows.samples[0]).__name__ if len(rows) else 'thing without columns'}: let .map() make a dict of each "
        'row, or read batches with batch_format="torch" or "numpy".'
    )


def _stacked(samples: Any) -> Any:
    """Samples that are dicts or tuples: one array for each of their places."""
    first = samples[0] if len(samples) else ()
    if isinstance(first, Mapping):
        return {name: _stacked([sample[name] for sample in samples]) for name in first}
    if isinstance(first, tuple | list):
        return tuple(_stacked([sample[place] for sample in samples]) for place in range(len(first)))
    return column_of(samples, "the rows")


def _numpy(rows: Columns) -> dict[str, Any]:
    return {name: as_numpy(name, column) for name, column in rows.columns.items()}


def _pandas(rows: Columns) -> Any:
    from paceline.data.pandas_batches import frame_of

    return frame_of(rows)


def _torch(rows: Columns, is_collated: bool) -> Any:
    from paceline.data.torch_batches import tensors

    return tensors(rows, is_collated)


_OF_COLUMNS: dict[str, Callable[[Columns], Any]] = {"numpy": _numpy, "pandas": _pandas, "pyarrow": to_arrow}


def from_batch(value: Any, what: str) -> Rows:
    """What a function of the user's made: a dict of columns, an Arrow table, a data frame, or a list of objects."""
    if isinstance(value, Mapping):
        columns = {str(name): column_of(column, f"{what}, column {name!r}") for name, column in value.items()}
        sizes = {name: len(column) for name, column in columns.items()}
        if len(set(sizes.values())) > 1:
            raise DataError(f"The function given to {what} returned columns of different lengths: {sizes}.")
        return Columns(columns)
    if hasattr(value, "schema") and hasattr(value, "num_rows"):
        return from_arrow(value)
    if hasattr(value, "iloc"):
        from paceline.data.pandas_batches import columns_of

        return columns_of(value)
    if isinstance(value, list | tuple):
        return Samples(list(value))
    raise DataError(
        f"The function given to {what} returned a {type(value).__name__}; expected a dict of arrays, an Arrow table, a "
        "data frame or a list."
    )


def column_of(values: Any, what: str) -> Any:
    if isinstance(values, np.ndarray):
        return values if values.dtype != object else _of_objects(values.tolist(), what)
    if type(values).__module__.startswith("pyarrow"):
        return unwrapped(values)
    if hasattr(values, "__array__") and not isinstance(values, list | tuple):  # a tensor, a series
        return np.asarray(values)
    return _of_objects(list(values), what)


def _of_objects(values: list[Any], what: str) -> Any:
    """Numbers, or arrays of one shape, as an array; text and lists of any length as Arrow's."""
    first = values[0] if values else 0.0
    if isinstance(first, str | bytes | Mapping) or any(value is None for value in values):
        return _arrow(values, what)
    try:
        parts = [np.asarray(value) for value in values]
    except (ValueError, TypeError):  # lists of lists of different lengths
        return _arrow(values, what)
    if len({part.shape for part in parts}) > 1:
        if parts[0].ndim != 1:
            raise DataError(
                f"{what}: the values have different shapes, {parts[0].shape} and others, and so are no column. Give "
                "them one shape, or make rows that are tuples, of which collate_fn gets a list."
            )
        return _arrow([part.tolist() for part in parts], what)
    stacked = np.stack(parts) if parts else np.empty(0)
    return stacked if stacked.dtype.kind in "biufcmM" else _arrow(values, what)


def _arrow(values: list[Any], what: str) -> Any:
    import pyarrow as pa

    try:
        return pa.array(values)
    except (pa.ArrowException, OverflowError, UnicodeError, ValueError, TypeError) as error:
        raise DataError(f"{what}: the values cannot be a column: {error}") from error
