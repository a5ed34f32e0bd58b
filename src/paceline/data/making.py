"""How datasets are made: of files, and of what people have in memory."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from paceline import registry
from paceline.data.dataset import LANES, Dataset, dataset_of
from paceline.errors import ArgumentTypeError, MissingDependencyError

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def read_parquet(paths: Paths, *, columns: Sequence[str] | None = None, lanes: int = LANES) -> Dataset:
    """Parquet files, read row group by row group.

    Args:
        paths: a path, a glob, a folder, a URL that fsspec knows (`s3://…`), or a list of these.
        columns: those to read. Default: all.
        lanes: in how many places the data is read at once; rows of a batch come from all of them. Row groups of that
            many lanes are in memory, of all ranks together, and some that are read ahead. With less lanes than ranks,
            several ranks read the same row groups. 1 is the order of the files.
    """
    files = _files(paths, (".parquet", ".pq", ".parq"))
    source = registry.find("dataset", "parquet")(files, columns)
    return dataset_of(source, str(files), lanes)


def read_csv(
    paths: Paths,
    *,
    lanes: int = LANES,
    delimiter: str = ",",
    schema: Any = None,
    block_bytes: int | None = None,
    newlines_in_values: bool = False,
    column_names: Sequence[str] | None = None,
) -> Dataset:
    """CSV files whose first line has the columns' names, read in blocks of whole lines. `paths` and `lanes` are those
    of `read_parquet`.

    Args:
        delimiter: between the values of a line.
        column_names: if the first line is a row already.
        schema: an Arrow schema, if the first block does not show the types.
        block_bytes: how much is read at once. Default: 16 MB.
        newlines_in_values: whether there is text in quotes with line ends, which makes each file one block.
    """
    files = _files(paths, (".csv", ".csv.gz"))
    source = registry.find("dataset", "csv")(files, delimiter, newlines_in_values, block_bytes, schema, column_names)
    return dataset_of(source, str(files), lanes)


def read_json(paths: Paths, *, lanes: int = LANES, schema: Any = None, block_bytes: int | None = None) -> Dataset:
    """Files with a JSON object on each line. `paths` and `lanes` are those of `read_parquet`.

    Args:
        schema: an Arrow schema, if the first block does not show all fields and their types.
        block_bytes: how much is read at once. Default: 16 MB.
    """
    files = _files(paths, (".jsonl", ".json", ".ndjson", ".jsonl.gz"))
    return dataset_of(registry.find("dataset", "json")(files, block_bytes, schema), str(files), lanes)


def from_numpy(columns: Mapping[str, Any] | Any) -> Dataset:
    """Arrays of one length, by name: the columns."""
    return dataset_of(registry.find("dataset", "numpy")(columns), "arrays")


def as_dataset(value: Any, which: str = "dataset") -> Dataset:
    """Any dataset that Paceline knows: a torch Dataset or IterableDataset, an array, a data frame, an Arrow table, a
    Hugging Face dataset."""
    if isinstance(value, Dataset):
        return value
    for name in registry.names("dataset"):
        kind = registry.find("dataset", name)
        if kind.takes(value):
            return dataset_of(kind(value), type(value).__name__)
    raise ArgumentTypeError(
        f"{which} is a {type(value).__module__}.{type(value).__qualname__}; expected a torch dataset, a numpy array, a "
        "pandas frame, an Arrow table, a Hugging Face dataset, a Ray dataset, or what paceline.data.read_parquet, "
        "read_csv, read_json and from_numpy make; a dict names several, a list of (train, val) pairs is a set of folds."
    )


def _files(paths: Any, endings: tuple[str, ...]) -> Any:
    if find_spec("pyarrow") is None:
        raise MissingDependencyError("pyarrow", "data", "Reading files")
    from paceline.data.kinds.files import find_files

    return find_files(paths, endings)
