"""The places at which the data of one epoch is read: each gives its rows one after the other, by number.

A lane reads ahead in a thread. What it gives is a function of (data, seed, epoch) alone.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from paceline.data.base import Block, Indexed, Stream
from paceline.data.dealing import Range
from paceline.data.formats import from_batch
from paceline.data.membership import numbers_of
from paceline.data.ops import Context, Op, apply
from paceline.data.permutation import Permutation
from paceline.data.rows import Rows, Samples
from paceline.data.seeds import derived_seed
from paceline.errors import DataError

_AT_ONCE = 16384
"""Numbers of rows that are shuffled at a time: it costs little more than for one batch."""

Numbered = tuple[Rows, Any]
"""Rows, and the numbers by which they are known."""


class IndexLane:
    """Any rows by their numbers, in an order that needs no reading."""

    def __init__(self, number: int, source: Indexed, order: Permutation | None, context: Context, first_id: int = 0):
        self.number, self._source, self._order, self._context = number, source, order, context
        self._first_id = first_id
        self._size = len(source)
        self._known: tuple[int, Any] = (0, np.empty(0, np.int64))
        """Some of the order, from this slot on."""

    def count_up_to(self, limit: int) -> int:
        return min(limit, self._size)

    def ranges(self, start: int, stop: int) -> list[Range]:
        return [Range(self.number, start, stop)]

    def expect(self, start: int, stop: int) -> None:
        pass  # it reads what is asked for, when it is

    def forget(self, stop: int) -> None:
        pass  # it keeps nothing

    def read(self, start: int, stop: int) -> Numbered:
        from paceline.data.draws import drawing_for

        indices = self._indices(start, stop)
        ids = numbers_of(self._source, indices)
        with drawing_for(self._context.seed, self._context.epoch, ids):
            return self._source.take(indices), ids + self._first_id if self._first_id else ids

    def _indices(self, start: int, stop: int) -> Any:
        if self._order is None:
            return np.arange(start, stop)
        first, known = self._known
        if not first <= start <= stop <= first + len(known):
            known = self._order(np.arange(start, min(self._size, max(stop, start + _AT_ONCE))))
            self._known = first, known = start, known
        return known[start - first : stop - first]


@dataclass(frozen=True)
class Unit:
    """What is read at once: some blocks, whose rows are mixed if `seed` is given."""

    blocks: tuple[Block, ...]
    seed: int | None


class BlockLane:
    """Blocks one after the other. How many rows a block has may be known only when it was read and filtered: that is
    remembered in `counts`, for all epochs."""

    def __init__(
        self,
        number: int,
        units: Sequence[Unit],
        read: Callable[[Block], Numbered],
        count: Callable[[Block], int],
        counts: MutableMapping[int, int],
        finish: Callable[[Rows], Rows],
        seat: tuple[int, int] | None = (0, 1),
    ):
        """`seat`: which of how many lanes it is that are read from the beginning of the epoch on; None if it comes
        later."""
        self._seat = seat
        self.number, self._units, self._read_block, self._count_block = number, units, read, count
        self._counts, self._finish = counts, finish
        self._ends: list[int] = []
        """Of the units whose size is known: where the next one begins."""
        self._windows: dict[int, Future[Numbered] | Numbered] = {}
        """The rows of a unit, or the promise of them: of the one that is used, and of the next."""
        self._at = 0
        """The number of the unit that is used."""
        self._used: tuple[int, int, Numbered | None] = (0, 0, None)
        """Its first row, the first one beyond it, and its rows."""
        self._executor: Executor | None = None
        self._is_ours = False
        """Whether it is to be read, so that counting its rows may as well read them."""

    def is_begun_by(self, rank: int, world_size: int) -> bool:
        """Whether that rank is the first to read it, at the beginning of an epoch."""
        return self._seat is not None and self._seat[0] * world_size // self._seat[1] == rank

    def forget(self, stop: int) -> None:
        """Nothing before that row is asked for again. At the end, nothing is kept."""
        if self._ends and len(self._ends) == len(self._units) and stop >= self._ends[-1]:
            self._windows, self._used = {}, (0, 0, None)

    def count_up_to(self, limit: int) -> int:
        while (self._ends[-1] if self._ends else 0) < limit and len(self._ends) < len(self._units):
            self._ends.append((self._ends[-1] if self._ends else 0) + self._size_of(len(self._ends)))
        return min(limit, self._ends[-1] if self._ends else 0)

    def num_known(self) -> int:
        """How many rows there are at the least, without reading."""
        count = 0
        for unit in self._units:
            sizes = [self._counts.get(block.number) for block in unit.blocks]
            if None in sizes:
                break
            count += sum(filter(None, sizes))
        return count

    def ranges(self, start: int, stop: int) -> list[Range]:
        return [Range(self.number, start, stop)]

    def begin(self, executor: Executor | None, is_ours: bool) -> None:
        """Says who reads ahead; and whether it is read from the first row on, by us."""
        self._executor, self._is_ours = executor, is_ours
        if is_ours:
            self._ask_for(0)

    def expect(self, start: int, stop: int) -> None:
        """These rows are asked for next: begins to read them, without waiting. So all lanes of a batch read at once,
        and each of them before any reads further ahead."""
        first, end, _ = self._used
        if self._executor is not None and (start < first or stop > end):
            self._is_ours = True
            self.count_up_to(stop)
            for number in range(bisect_right(self._ends, start), bisect_left(self._ends, stop) + 1):
                self._ask_for(number)

    def read(self, start: int, stop: int) -> Numbered:
        first, end, window = self._used
        if window is None or start < first or stop > end:
            return self._read_on(start, stop)
        rows, ids = window
        return rows.slice(start - first, stop - first), ids[start - first : stop - first]

    def _read_on(self, start: int, stop: int) -> Numbered:
        self._is_ours = True
        self.count_up_to(stop)
        found: list[Numbered] = []
        number = bisect_right(self._ends, start)
        while start < stop:
            first, end = self._ends[number - 1] if number else 0, self._ends[number]
            self._at, self._used = number, (first, end, self._window(number))
            self._windows = {other: window for other, window in self._windows.items() if other >= number}
            self._ask_for(number + 1)
            upto = min(stop, end)
            found.append(self.read(start, upto))
            start, number = upto, number + 1
        return joined(found)

    def _size_of(self, number: int) -> int:
        blocks = self._units[number].blocks
        if self._is_ours and number <= self._at + 1 and any(block.number not in self._counts for block in blocks):
            self._window(number)  # those further on are only counted: they would fill the memory
        for block in blocks:
            if block.number not in self._counts:
                self._counts[block.number] = self._count_block(block)
        return sum(self._counts[block.number] for block in blocks)

    def _window(self, number: int) -> Numbered:
        window = self._windows.get(number)
        if window is None:
            window = self._load(number)
        elif isinstance(window, Future):
            window = window.result()
        self._windows[number] = window
        return window

    def _ask_for(self, number: int) -> None:
        if self._executor is not None and number < len(self._units) and number not in self._windows:
            self._windows[number] = self._executor.submit(self._load, number)

    def _load(self, number: int) -> Numbered:
        unit = self._units[number]
        parts = [self._read_block(block) for block in unit.blocks]
        for block, (rows, _) in zip(unit.blocks, parts, strict=True):
            expected = self._counts.setdefault(block.number, len(rows))
            if expected != len(rows):
                raise DataError(
                    f"{block.name}: {len(rows)} rows are there now that pass the filters, and {expected} when they "
                    "were counted. Has the data changed, or does a filter not always say the same of a row?"
                )
        rows, ids = joined(parts)
        del parts  # what is made of them takes as much memory again
        rows = self._finish(rows)
        if unit.seed is None:
            return rows, ids
        order = np.random.Generator(np.random.Philox(unit.seed)).permutation(len(rows))
        return rows.take(order), ids[order]


class StreamLane:
    """Rows that come one after the other. Every rank goes through all of them, and keeps its own."""

    def __init__(self, number: int, source: Stream, ops: Sequence[Op], context: Context, first_id: int):
        self.number, self._source, self._ops, self._context = number, source, ops, context
        self._first_id = first_id
        self._rows: Iterator[Any] | None = None
        self._next = 0
        """The number in the source of the row that comes next."""
        self._begin, self._kept = 0, deque[tuple[Any, int]]()
        """Rows that have passed the filters and may still be asked for, from this number on."""
        self._total: int | None = None

    def skip_to(self, number: int) -> None:
        """Nothing before it will be asked for: what can be skipped without reading is."""
        if self._rows is None and not any(op.drops_rows for op in self._ops):
            self._begin = self._next = number

    def count_up_to(self, limit: int) -> int:
        while self._total is None and self._begin + len(self._kept) < limit:
            self._pull()
        return limit if self._total is None else min(limit, self._total)

    def ranges(self, start: int, stop: int) -> list[Range]:
        return [Range(self.number, start, stop)]

    def expect(self, start: int, stop: int) -> None:
        pass  # there is no reading ahead: the user's iterator may do anything

    def forget(self, stop: int) -> None:
        while self._begin < stop and self._kept:
            self._kept.popleft()
            self._begin += 1

    def read(self, start: int, stop: int) -> Numbered:
        if start < self._begin:  # somebody looks back
            return replay(self, start, stop)
        self.count_up_to(stop)
        self.forget(start)
        found = [self._kept[index] for index in range(stop - start)]
        return _rows_of([row for row, _ in found]), np.array([id for _, id in found], dtype=np.int64)

    def again(self) -> StreamLane:
        return StreamLane(self.number, self._source, self._ops, self._context, self._first_id)

    def _pull(self) -> None:
        from paceline.data.draws import drawing_for

        if self._rows is None:
            self._rows = self._source.open(self._next, self._context.epoch)
        number = self._next
        with drawing_for(self._context.seed, self._context.epoch, number):
            row = next(self._rows, _END)
        if row is _END:
            self._total = self._begin + len(self._kept)
            return
        self._next += 1
        context = replace(self._context, name=f"row {number} of {self._context.name}")
        rows, ids = apply(self._ops, _rows_of([row]), np.array([self._first_id + number]), context)
        if len(rows):
            self._kept.append((rows.row(0), int(ids[0])))


_END: Any = object()


def _rows_of(rows: list[Any]) -> Rows:
    """Columns, if they are dicts."""
    if not rows or not isinstance(rows[0], dict):
        return Samples(rows)
    for row in rows:
        if not isinstance(row, dict) or row.keys() != rows[0].keys():
            other = ", ".join(map(str, row)) if isinstance(row, dict) else f"a {type(row).__name__}"
            raise DataError(
                f"The dataset gave a row with the columns {', '.join(map(str, rows[0]))}, and one with {other}: "
                "expected the same columns in every row."
            )
    return from_batch({name: [row[name] for row in rows] for name in rows[0]}, "the dataset")


def replay(lane: StreamLane, start: int, stop: int) -> Numbered:
    return lane.again().read(start, stop)


def joined(parts: Sequence[Numbered]) -> Numbered:
    if len(parts) == 1:
        return parts[0]
    rows, ids = parts[0]
    return rows.joined([other for other, _ in parts[1:]]), np.concatenate([ids, *(more for _, more in parts[1:])])


def spread(blocks: Sequence[Block], num_lanes: int) -> list[list[Block]]:
    """Each block to the lane that has least: none has more than one block more than another."""
    lanes: list[list[Block]] = [[] for _ in range(max(1, min(num_lanes, len(blocks))))]
    loads = [0] * len(lanes)
    for block in blocks:
        least = loads.index(min(loads))
        lanes[least].append(block)
        loads[least] += max(1, block.weight)
    return lanes


def units_of(blocks: Sequence[Block], per_unit: int, seed: int | None) -> list[Unit]:
    return [
        Unit(
            tuple(blocks[start : start + per_unit]),
            None if seed is None else derived_seed("rows", seed, blocks[start].number),
        )
        for start in range(0, len(blocks), per_unit)
    ]
