"""Rows in memory: as columns, or as whatever objects a dataset gives.

Numbers are numpy arrays, which are cut, gathered and joined for next to nothing; text and whatever else has no such
form stays in Arrow.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self

import numpy as np

from paceline.errors import DataError

Column = Any
"""A numpy array, or an Arrow array."""


class Rows(Protocol):
    def __len__(self) -> int: ...

    def slice(self, start: int, stop: int) -> Self: ...

    def take(self, indices: Any) -> Self: ...

    def joined(self, others: Sequence[Self]) -> Self:
        """This one, and then the others."""
        ...

    def row(self, index: int) -> Any:
        """One of them, as a function of the user's gets it."""
        ...


class Columns:
    """Of equal length, by name. `origin` says of what they were made, if that is not seen in their names any more: only
    those of the same origin can be joined."""

    def __init__(self, columns: Mapping[str, Column], size: int | None = None, origin: tuple[str, ...] = ()):
        self.columns, self.origin = dict(columns), origin
        self._size = len(next(iter(self.columns.values()), ())) if size is None else size

    def __len__(self) -> int:
        return self._size

    def slice(self, start: int, stop: int) -> "Columns":
        if start == 0 and stop == self._size:
            return self
        parts = {name: column[start:stop] for name, column in self.columns.items()}
        return Columns(parts, stop - start, self.origin)

    def take(self, indices: Any) -> "Columns":
        taken = {
            name: column.take(indices, 0) if isinstance(column, np.ndarray) else column.take(indices)
            for name, column in self.columns.items()
        }
        return Columns(taken, len(indices), self.origin)

    def joined(self, others: Sequence["Columns"]) -> "Columns":
        if not others:
            return self
        parts = [self, *others]
        for other in others:
            if not isinstance(other, Columns):
                raise _unlike(self, other)
            if other.origin != self.origin or other.columns.keys() != self.columns.keys():
                mine, theirs = (one.origin or tuple(one.columns) for one in (self, other))
                raise DataError(
                    f"Rows with the columns {', '.join(mine)} come together with rows that have {', '.join(theirs)}: "
                    "give what is mixed the same columns in one order, with .select_columns() or .map(), or name "
                    "feature_columns and label_column."
                )
        made = {name: _joined(name, [part.columns[name] for part in parts]) for name in self.columns}
        return Columns(made, sum(map(len, parts)), self.origin)

    def row(self, index: int) -> dict[str, Any]:
        try:
            return {
                name: _plain(column[index]) if isinstance(column, np.ndarray) else column[index].as_py()
                for name, column in self.columns.items()
            }
        except UnicodeDecodeError as error:
            raise no_text(error) from error

    def select(self, names: Sequence[str]) -> "Columns":
        missing = [name for name in names if name not in self.columns]
        if missing:
            raise DataError(f"There is no column {missing[0]!r}; there are {', '.join(map(repr, self.columns))}.")
        return Columns({name: self.columns[name] for name in names}, self._size)


class Samples:
    """Objects as a dataset gives them: tuples of tensors, say."""

    def __init__(self, samples: Sequence[Any]):
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def slice(self, start: int, stop: int) -> "Samples":
        return Samples(self.samples[start:stop])

    def take(self, indices: Any) -> "Samples":
        return Samples([self.samples[index] for index in indices])

    def joined(self, others: Sequence["Samples"]) -> "Samples":
        for other in others:
            if not isinstance(other, Samples):
                raise _unlike(other, self)
        return Samples([sample for part in (self, *others) for sample in part.samples])

    def row(self, index: int) -> Any:
        return self.samples[index]


def check_names(names: Sequence[str], where: Any) -> None:
    """Columns are known by their names."""
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"{where} has several columns named {twice!r}; expected a name of its own for each.")


def from_arrow(table: Any) -> Columns:
    """An Arrow table or record batch."""
    return Columns({name: unwrapped(table.column(name)) for name in table.schema.names}, table.num_rows)


def without_codes(table: Any) -> Any:
    """The table with categories as what they stand for. The code of one is another in every file and row group: who
    trained on codes would mix them up."""
    import pyarrow as pa

    for place, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):
            table = table.set_column(place, field.name, table.column(place).cast(field.type.value_type))
    return table


def unwrapped(column: Any) -> Column:
    """An Arrow column as a numpy array, if it holds numbers or equally long lists of them."""
    import pyarrow as pa

    array = column
    if isinstance(array, pa.ChunkedArray):  # one chunk is taken as it is: to combine it would be to copy it
        array = array.chunk(0) if array.num_chunks == 1 else array.combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # more than one array can hold
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    if pa.types.is_string_view(array.type) or pa.types.is_binary_view(array.type):  # which Arrow cannot gather yet
        array = array.cast(pa.large_string() if pa.types.is_string_view(array.type) else pa.large_binary())
    kind = array.type
    is_number = pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_floating(kind)
    if is_number or (pa.types.is_temporal(kind) and getattr(kind, "tz", None) is None):
        # Numpy knows no missing numbers, which are not the same as NaN to a filter, and no time zones.
        return array if array.null_count else array.to_numpy(zero_copy_only=False)
    if pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _matrix(array)
    return array


def _matrix(array: Any) -> Column:
    import pyarrow as pa

    inner = array.type.value_type
    is_number = pa.types.is_integer(inner) or pa.types.is_floating(inner)
    if not is_number or array.null_count or len(array) == 0:
        return array
    values = array.flatten()
    width = len(values) // len(array)
    if values.null_count or len(values) != width * len(array) or not width:
        return array
    if not pa.types.is_fixed_size_list(array.type):
        offsets = array.offsets.to_numpy()
        if not (np.diff(offsets) == width).all():
            return array
    return values.to_numpy(zero_copy_only=False).reshape(len(array), width)


def to_arrow(rows: Columns) -> Any:
    import pyarrow as pa

    return pa.table({name: _arrow_array(column) for name, column in rows.columns.items()})


def _arrow_array(column: Column) -> Any:
    import pyarrow as pa

    if not isinstance(column, np.ndarray):
        return column
    if column.ndim == 1:
        return pa.array(column)
    if 0 in column.shape[1:]:  # Arrow knows no lists of a fixed size of 0
        kind = pa.from_numpy_dtype(column.dtype)
        for _ in column.shape[1:]:
            kind = pa.list_(kind)
        return pa.array(column.tolist(), kind)
    flat = _arrow_array(column.reshape(-1, *column.shape[2:]))
    return pa.FixedSizeListArray.from_arrays(flat, column.shape[1])


def as_numpy(name: str, column: Column) -> Any:
    if isinstance(column, np.ndarray):
        return column
    import pyarrow as pa

    kind = column.type
    if column.null_count and (pa.types.is_integer(kind) or pa.types.is_boolean(kind)):
        raise DataError(
            f"The column {name!r} has {column.null_count} missing values among its {kind} numbers, which numpy and "
            "torch do not know. Leave such rows out with .filter(), fill them in with .map_batches(), or read batches "
            'with batch_format="pandas" or "pyarrow".'
        )
    try:
        return column.to_numpy(zero_copy_only=False)
    except (UnicodeDecodeError, pa.ArrowException) as error:
        raise no_text(error) from error


def no_text(error: Exception) -> DataError:
    """A Parquet file says of a column that it is text, and nobody looks whether that is so before it is used."""
    return DataError(
        f"Text that is no UTF-8 cannot be read, nor other values that are none: {error}. Is a file damaged?"
    )


def _unlike(columns: Columns, samples: Samples) -> DataError:
    kind = type(samples.samples[0]).__name__ if len(samples) else "thing without columns"
    return DataError(
        f"Rows with the columns {', '.join(columns.columns)} come together with rows each of which is a {kind}: let "
        ".map() make the same of all of them."
    )


def _joined(name: str, parts: Sequence[Column]) -> Column:
    are_alike = all(isinstance(part, np.ndarray) for part in parts) and len({part.shape[1:] for part in parts}) == 1
    if are_alike and (len({part.dtype for part in parts}) == 1 or all(part.dtype.kind in "biufc" for part in parts)):
        return np.concatenate(parts)
    import pyarrow as pa

    arrays = [_arrow_array(part) for part in parts]
    kinds = list(dict.fromkeys(array.type for array in arrays))
    if len(kinds) > 1:  # numbers of different widths; lists that are equally long in one place, and not in another
        try:
            schemas = [pa.schema([(name, kind)]) for kind in kinds]
            common = pa.unify_schemas(schemas, promote_options="permissive").field(0).type
            arrays = [array.cast(common) for array in arrays]
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
            raise DataError(
                f"The column {name!r} holds {kinds[0]} values in one place and {kinds[1]} in another, which cannot be "
                "put together: make them alike with .map()."
            ) from error
    # In chunks, which copies nothing: texts and images are the large columns.
    chunks = [chunk for array in arrays for chunk in (array.chunks if isinstance(array, pa.ChunkedArray) else [array])]
    return pa.chunked_array(chunks)


def _plain(value: Any) -> Any:
    """A number of Python's, not of numpy's."""
    return value.item() if isinstance(value, np.generic) else value
