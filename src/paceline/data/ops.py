"""What is done to rows on their way: filter, map, choose columns. Each is a value that travels to the workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from paceline.data.base import Block
from paceline.data.draws import Row, drawing_for
from paceline.data.formats import from_batch, to_batch
from paceline.data.identity import identity_of
from paceline.data.rows import Columns, Rows, Samples, to_arrow
from paceline.errors import DataError, PacelineError


@dataclass(frozen=True)
class Context:
    """Where rows come from, for messages and for random draws."""

    name: str
    seed: int = 0
    epoch: int = 0
    block: int | None = None
    id_column: str | None = None
    """Which has the names of rows, where not their numbers are asked for."""


class Op(Protocol):
    drops_rows: bool
    """Whether there may be fewer rows afterwards."""

    def __call__(self, rows: Rows, ids: Any, context: Context) -> tuple[Rows, Any]:
        """The rows, and the numbers by which they are known, afterwards."""
        ...

    @property
    def columns(self) -> Sequence[str] | None:
        """Those that it looks at; None: any."""
        ...

    replaces_columns: bool
    """Whether there are no other columns afterwards."""

    @property
    def identity(self) -> str:
        """The same, in every process, for what does the same."""
        ...


@dataclass(frozen=True)
class Filter:
    """Keeps rows for which a function is true, or an Arrow expression."""

    condition: Any
    columns: Sequence[str] | None = None
    drops_rows = True
    replaces_columns = False

    def __call__(self, rows: Rows, ids: Any, context: Context) -> tuple[Rows, Any]:
        if callable(self.condition):
            always = replace(context, epoch=0)  # which rows there are is the same in all epochs, also if it is drawn
            keep = np.array(_each(lambda row: bool(self.condition(row)), rows, ids, always, ".filter()"), dtype=bool)
        else:
            keep = self._matches(rows)
        kept = np.flatnonzero(keep)
        return (rows, ids) if len(kept) == len(rows) else (rows.take(kept), ids[kept])

    @property
    def identity(self) -> str:
        return f"filter {identity_of(self.condition)}"

    def _matches(self, rows: Rows) -> Any:
        import pyarrow as pa

        if not isinstance(rows, Columns):
            raise DataError("An Arrow expression can be used with columns only; give .filter() a function.")
        number = "__row__"
        table = to_arrow(rows).append_column(number, pa.array(np.arange(len(rows))))
        keep = np.zeros(len(rows), bool)
        keep[table.filter(self.condition).column(number).to_numpy()] = True
        return keep


@dataclass(frozen=True)
class Limit:
    """Keeps the first rows of the data that come so far. Stands for a Quota."""

    size: int
    columns: Sequence[str] = ()
    drops_rows = True
    replaces_columns = False

    @property
    def identity(self) -> str:
        return f"limit {self.size}"

    def num_kept(self, blocks: Sequence[Block]) -> int | None:
        """Of the rows of these blocks; None if it has to be read how many they are."""
        sizes = [block.rows for block in blocks]
        return None if None in sizes else min(self.size, sum(filter(None, sizes)))

    def __call__(self, rows: Rows, ids: Any, context: Context) -> tuple[Rows, Any]:
        raise AssertionError("a limit is made a quota before anything is read")


@dataclass(frozen=True)
class Quota:
    """Keeps the first rows of each block."""

    quotas: dict[int, int]
    columns: Sequence[str] = ()
    drops_rows = True
    replaces_columns = False

    @property
    def identity(self) -> str:
        return f"quota {self.quotas}"

    def __call__(self, rows: Rows, ids: Any, context: Context) -> tuple[Rows, Any]:
        assert context.block is not None
        size = min(len(rows), self.quotas.get(context.block, 0))
        return rows.slice(0, size), ids[:size]


@dataclass(frozen=True)
class Map:
    """A function of one row."""

    fn: Callable[[Any], Any]
    drops_rows = False
    replaces_columns = False
    columns = None

    @property
    def identity(self) -> str:
        return f"map {identity_of(self.fn)}"

    def __call__(self, rows: Rows, ids: Any, context: Context) -> tuple[Rows, Any]:
        return _gathered(_each(self.fn, rows, ids, context, ".map()"), rows, context), ids


@dataclass(frozen=True)
class MapBatches:
    """A function of many rows at once. It gives as many back as it gets."""

    fn: Callable[[Any], Any]
    batch_format: str
    batch_size: int
    drops_rows = False
    replaces_columns = False
    columns = None

    @property
    def identity(self) -> str:
        return f"map_batches {identity_of(self.fn)} {self.batch_format} {self.batch_size}"

    def __call__(self, rows: Rows, ids: Any, context: Context) -> tuple[Rows, Any]:
        if not len(rows):
            return rows, ids
        parts = []
        for start in range(0, len(rows), self.batch_size):
            part = rows.slice(start, min(len(rows), start + self.batch_size))
            with drawing_for(context.seed, context.epoch, ids[start : start + len(part)]):
                given = to_batch(part, self.batch_format)
                made = from_batch(_called(self.fn, given, context, ".map_batches()"), ".map_batches()")
            if len(made) != len(part):
                raise DataError(
                    f"The function given to .map_batches() got {len(part)} rows of {context.name} and returned "
                    f"{len(made)}; expected as many. Leave rows out with .filter()."
                )
            parts.append(made)
        return parts[0].joined(parts[1:]), ids


@dataclass(frozen=True)
class Select:
    """Keeps some columns."""

    names: tuple[str, ...]
    drops_rows = False
    replaces_columns = True

    @property
    def columns(self) -> Sequence[str]:
        return self.names

    @property
    def identity(self) -> str:
        return f"select {self.names}"

    def __call__(self, rows: Rows, ids: Any, context: Context) -> tuple[Rows, Any]:
        if not isinstance(rows, Columns):
            raise DataError(".select_columns(): these rows have no columns.")
        return rows.select(self.names), ids


def apply(ops: Sequence[Op], rows: Rows, ids: Any, context: Context) -> tuple[Rows, Any]:
    for op in ops:
        rows, ids = op(rows, ids, context)
    return rows, ids


def _each(fn: Callable[[Any], Any], rows: Rows, ids: Any, context: Context, what: str) -> list[Any]:
    made = []
    for index, id in enumerate(ids.tolist()):
        row = rows.row(index)
        with drawing_for(context.seed, context.epoch, id):
            made.append(_called(fn, Row(row, id) if isinstance(row, dict) else row, context, what, index))
    return made


def _called(fn: Callable[[Any], Any], given: Any, context: Context, what: str, index: int | None = None) -> Any:
    try:
        return fn(given)
    except PacelineError:
        raise
    except Exception as error:
        where = context.name if index is None else f"row {index} of {context.name}"
        if isinstance(error, StopIteration):  # to loops on the way it would be the end of the data
            raise DataError(f"The function given to {what} raised StopIteration, for {where}.") from error
        with suppress(Exception):  # it may be of a kind that takes no notes
            error.add_note(f"It was raised by the function given to {what}, for {where}.")
        raise


def _gathered(made: list[Any], former: Rows, context: Context) -> Rows:
    """What a function made of each row: columns, if it makes dicts."""
    if not made:
        return former
    if any(one is None for one in made):
        raise DataError(
            f"The function given to .map() returned None for a row of {context.name}; expected the row that is made of "
            "it. Is a `return` missing? Leave rows out with .filter()."
        )
    if not isinstance(made[0], dict):
        return Samples(made)
    names = list(made[0])
    for index, row in enumerate(made):
        if not isinstance(row, dict) or (list(row) != names and sorted(row) != sorted(names)):
            raise DataError(
                f"The function given to .map() made {sorted(names)} of the first row of {context.name} and "
                f"{sorted(row) if isinstance(row, dict) else type(row).__name__} of row {index}; expected the same "
                "columns of every row."
            )
    return from_batch({name: [row[name] for row in made] for name in names}, ".map()")
