"""Who is in which fold: by a rule, or by a number for each row. Both are values that travel to the workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np

from paceline.data.base import Block, Indexed
from paceline.data.ops import Context
from paceline.data.permutation import scrambled
from paceline.data.rows import Columns, Rows
from paceline.errors import DataError

NOWHERE = -1
"""The fold of a row that was not there when the folds were made."""
_OWN_NUMBER = (1 << 56) - 1
"""The bits of a row's number that do not say from which of several mixed datasets it is: a fold that is mixed with
other data keeps its rows."""


@dataclass(frozen=True)
class InFold:
    """Keeps the rows of one fold, or all others. Which fold a row is in follows from its number, or from its group's
    key: nothing is read, no list is kept, and it is the same in every run.

    Of as many neighbouring rows as there are folds, each is in another one: folds are equally large, to within a row
    for each block. Who is first is random. A plain hash of the number would leave folds of small data empty.
    """

    fold: int
    splits: int
    is_validation: bool
    seed: int
    group: str | None = None
    drops_rows = True
    replaces_columns = False

    @property
    def columns(self) -> Sequence[str] | None:
        return [] if self.group is None else [self.group]

    @property
    def identity(self) -> str:
        return repr(self)

    def __call__(self, rows: Rows, ids: Any, context: Context) -> tuple[Rows, Any]:
        folds = self._by_number(ids) if self.group is None else self._by_group(rows)
        kept = np.flatnonzero((folds == self.fold) == self.is_validation)
        return rows.take(kept), ids[kept]

    def num_kept(self, blocks: Sequence[Block]) -> int | None:
        """Of the rows of these blocks, without reading: None if their numbers or groups have to be read."""
        if self.group is not None or any(block.first_row is None or block.rows is None for block in blocks):
            return None
        sizes = np.array([block.rows for block in blocks], np.int64)
        firsts = np.array([block.first_row for block in blocks], np.int64)
        in_fold = int((self._num_below(firsts + sizes) - self._num_below(firsts)).sum())
        return in_fold if self.is_validation else int(sizes.sum()) - in_fold

    def _num_below(self, numbers: Any) -> Any:
        """How many rows of the fold have a smaller number: one of each whole round, and perhaps one of the next."""
        rounds, places = np.divmod(numbers, self.splits)
        own = (self.fold - scrambled(rounds, "folds", self.seed)) % self.splits
        return rounds + (own < places)

    def _by_number(self, ids: Any) -> Any:
        rounds, places = np.divmod(ids & _OWN_NUMBER, self.splits)
        return (places + scrambled(rounds, "folds", self.seed) % self.splits) % self.splits

    def _by_group(self, rows: Rows) -> Any:
        assert self.group is not None
        if not isinstance(rows, Columns):
            raise DataError(f"groups={self.group!r} names a column, and these rows have none: let .map() make dicts.")
        keys = _hashes(rows.select([self.group]).columns[self.group])
        return scrambled(keys, "groups", self.seed) % self.splits


class Roll:
    """The fold of each row, by block: the number of the block's first row, and the folds from there on. All folds share
    one, which takes a byte for each row."""

    def __init__(self, blocks: Mapping[int, tuple[int, Any]]):
        self._blocks = blocks

    def folds_of(self, block: int | None, ids: Any) -> Any:
        first, folds = self._blocks.get(-1 if block is None else block, (0, np.empty(0, np.int8)))
        places = (ids & _OWN_NUMBER) - first
        found = np.full(len(ids), NOWHERE, folds.dtype)
        is_known = places < len(folds)
        found[is_known] = folds[places[is_known]]
        return found

    def num_kept(self, fold: int, is_validation: bool) -> int:
        return sum(len(chosen(folds, fold, is_validation)) for _, folds in self._blocks.values())

    @cached_property
    def digest(self) -> str:
        return digest_of(folds for _, folds in self._blocks.values())


@dataclass(frozen=True)
class OnRoll:
    """Keeps the rows of one fold, or those of all others, as a roll has them."""

    fold: int
    is_validation: bool
    roll: Roll
    columns: Sequence[str] = ()
    drops_rows = True
    replaces_columns = False

    @property
    def identity(self) -> str:
        return f"OnRoll {self.fold} {self.is_validation} {self.roll.digest}"

    def num_kept(self, blocks: Sequence[Block]) -> int:
        return self.roll.num_kept(self.fold, self.is_validation)

    def __call__(self, rows: Rows, ids: Any, context: Context) -> tuple[Rows, Any]:
        kept = chosen(self.roll.folds_of(context.block, ids), self.fold, self.is_validation)
        return rows.take(kept), ids[kept]


class Subset:
    """Some rows of an indexed source: those of one fold, or those of all others. It is a view: `folds`, a number for
    each row of the source, is the same array in all folds, and rows keep the numbers that they have there."""

    def __init__(self, source: Indexed, folds: Any, fold: int, is_validation: bool):
        self.source, self._folds, self._fold, self._is_validation = source, folds, fold, is_validation

    @cached_property
    def indices(self) -> Any:
        return chosen(self._folds, self._fold, self._is_validation)

    def __len__(self) -> int:
        return len(self.indices)

    def take(self, indices: Any) -> Rows:
        return self.source.take(self.indices[indices])

    def column_names(self) -> list[str] | None:
        return self.source.column_names()

    def fingerprint(self) -> str:
        part = f"{self._fold} {self._is_validation} {digest_of([self._folds])}"
        return f"{self.source.fingerprint()} {part}"

    def describe(self) -> dict[str, Any]:
        part = "val" if self._is_validation else "train"
        return {"fold": self._fold, "part": part, "num_rows": len(self), "of": self.source.describe()}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "indices"}


def numbers_of(source: Indexed, indices: Any) -> Any:
    """By which rows are known: a subset's are those of the data that it is cut from."""
    return numbers_of(source.source, source.indices[indices]) if isinstance(source, Subset) else indices


def chosen(folds: Any, fold: int, is_validation: bool) -> Any:
    """The places of the rows that are in the fold; or in any other."""
    return np.flatnonzero(folds == fold if is_validation else (folds != fold) & (folds != NOWHERE))


def digest_of(arrays: Any) -> str:
    digest = blake2b(digest_size=16)
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _hashes(column: Any) -> Any:
    """63 bits of each value: the same in every process."""
    values = column.tolist() if isinstance(column, np.ndarray) else column.to_pylist()
    known: dict[str, int] = {}
    for text in map(repr, values):
        if text not in known:
            known[text] = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
    return np.array([known[repr(value)] for value in values], dtype=np.int64)
