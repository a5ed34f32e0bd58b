"""The rows of a source by their numbers: all in turn, some of them, or the numbers alone, for who keeps the rows
somewhere else."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np

from paceline.data.base import Indexed, Source, Stream
from paceline.data.dataset import Dataset, dataset_of
from paceline.data.rows import Rows, Samples


def chunks_of(source: Indexed | Stream, size: int) -> Iterator[Rows]:
    """All rows in their order, so many at once."""
    if isinstance(source, Indexed):
        for first in range(0, len(source), size):
            yield source.take(np.arange(first, min(first + size, len(source))))
        return
    stream = source.open(0, 0)
    while rows := list(islice(stream, size)):
        yield Samples(rows)


def rows_of(source: Indexed | Stream, numbers: list[int]) -> Rows:
    """Those of these numbers. A stream is read up to the last of them."""
    if isinstance(source, Indexed):
        return source.take(np.asarray(numbers, np.int64))
    first = list(islice(source.open(0, 0), max(numbers) + 1))
    return Samples([first[number] for number in numbers])


def samples_of_numbers(num_rows: int, size: int, how_many: int) -> list[list[int]]:
    """Numbers of rows that do not follow each other, so many times; the same each time that it is asked."""
    draw = np.random.default_rng(0)
    return [draw.permutation(num_rows)[:size].tolist() for _ in range(how_many)]


def numbers_of(source: Source, num_rows: int, name: str) -> Dataset:
    """A dataset whose rows are the numbers 0, 1, 2 … of those of the source. They come in the same order as the rows of
    the source would, and a position in the one is a position in the other: so a run that has begun with the one can
    go on with the other."""
    made: Source = RowNumbers(source, num_rows) if isinstance(source, Indexed) else StreamNumbers(source, num_rows)
    return dataset_of(made, name)


class _Numbers:
    identity = "numbers"
    """They are not the rows, although their order is the same."""

    def __init__(self, source: Source, num_rows: int):
        self._fingerprint, self._described, self._num_rows = source.fingerprint(), source.describe(), num_rows

    def fingerprint(self) -> str:
        return self._fingerprint

    def describe(self) -> Any:
        return self._described

    def column_names(self) -> None:
        return None


class RowNumbers(_Numbers):
    def __len__(self) -> int:
        return self._num_rows

    def take(self, indices: Any) -> Rows:
        return Samples(indices.tolist())


class StreamNumbers(_Numbers):
    def open(self, skip: int, epoch: int) -> Iterator[Any]:
        return iter(range(skip, self._num_rows))
