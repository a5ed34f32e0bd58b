"""One epoch of a dataset: its lanes, and the tree that says in which order their rows come."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.data.base import Block, Blocks, Indexed, Parted, Source, Stream
from paceline.data.dealing import Chain, Head, Node, Range, Together
from paceline.data.lanes import BlockLane, IndexLane, Numbered, StreamLane, joined, spread, units_of
from paceline.data.membership import numbers_of
from paceline.data.ops import Context, Filter, Limit, Map, MapBatches, Op, Quota, apply
from paceline.data.permutation import Permutation
from paceline.data.row_names import names_of, with_column
from paceline.data.rows import Columns, Rows
from paceline.data.seeds import derived_seed
from paceline.data.tree import First, Leaf, Mixture, Repeated, Tree
from paceline.errors import DataError

_VIRTUAL = 1024
"""Rows of an indexed dataset that are filtered at a time."""
_ID_BITS = 56
"""The rest of a row's number says which of several mixed datasets it is from."""

Lane = IndexLane | BlockLane | StreamLane


@dataclass
class Knowledge:
    """What was learned of the data on the way, good for all epochs: by leaf, how many rows of a block pass its
    filters."""

    counts: dict[int, dict[int, int]] = field(default_factory=dict)

    def as_state(self) -> dict[str, Any]:
        """For a checkpoint: blocks, and how many rows of each pass."""
        # Threads learn meanwhile. A copy is made at once; list(counts.items()) is not, since it makes objects, which
        # may begin a collection of garbage, in which others have their turn.
        known = {leaf: counts.copy() for leaf, counts in self.counts.copy().items()}
        return {
            str(leaf): [np.fromiter(part, np.int64, len(counts)) for part in (counts.keys(), counts.values())]
            for leaf, counts in known.items()
        }

    def learn(self, state: Mapping[str, Any]) -> None:
        try:
            for leaf, (blocks, counts) in state.items():
                known = dict(zip(map(int, blocks), map(int, counts), strict=True))
                if min([*known, *known.values()], default=0) < 0:
                    raise ValueError("a negative number")
                self.counts.setdefault(int(leaf), {}).update(known)
        except (AttributeError, TypeError, ValueError) as error:
            raise DataError(f"A checkpoint's counts of rows cannot be read: {str(state)[:200]}.") from error


@dataclass
class Plan:
    node: Node
    lanes: list[Lane]
    batch_ops: list[tuple[Sequence[Op], Context]]
    """By lane: what is done to its rows when they are in a batch."""
    finish: Callable[[Rows], Rows]

    def read(self, ranges: Sequence[Range]) -> Numbered | None:
        """None if there are no rows. They are known by the names that a column has for them, if that was asked for."""
        found: list[Numbered] = []
        for lane, start, stop in ranges:
            self.lanes[lane].expect(start, stop)
        for lane, start, stop in ranges:
            rows, ids = self.lanes[lane].read(start, stop)
            ops, context = self.batch_ops[lane]
            ids, names = _named(rows, ids, context)
            if ops:
                rows, ids = apply(ops, rows, ids, context)
                rows = self.finish(rows)
            elif not isinstance(self.lanes[lane], BlockLane):
                rows = self.finish(rows)
            found.append((rows, names))
        return joined(found) if found else None

    def forget(self, ranges: Sequence[Range]) -> None:
        """These rows were dealt to all ranks: nobody will ask for them."""
        for lane, _, stop in ranges:
            self.lanes[lane].forget(stop)

    def begin(self, done: int, rank: int, world_size: int, executor: Executor | None) -> None:
        """It will be read from there on, by that rank."""
        for lane in self.lanes:
            if isinstance(lane, BlockLane):
                lane.begin(executor, done == 0 and lane.is_begun_by(rank, world_size))
            elif isinstance(lane, StreamLane) and len(self.lanes) == 1:
                lane.skip_to(done)


def plan(
    tree: Tree,
    seed: int,
    epoch: int,
    knowledge: Knowledge,
    finish: Callable[[Rows], Rows],
    columns: Sequence[str] | None,
) -> Plan:
    builder = _Builder(seed, knowledge, finish, columns)
    node = builder.node(tree, epoch)
    return Plan(node, builder.lanes, builder.batch_ops, finish)


def known_size(tree: Tree) -> int | None:
    """How many rows an epoch has; None if that is known only when they are read."""
    match tree:
        case Leaf(source, ops=ops):
            return _known_size_of(source, [op for op in ops if op.drops_rows])
        case Mixture(children, _):
            totals = [known_size(child) for child in children]
            return None if None in totals else sum(filter(None, totals))
        case Repeated(child, times):
            total = known_size(child)
            return None if total is None else total * times
        case First(child, size):
            total = known_size(child)
            return None if total is None else min(total, size)


def _known_size_of(source: Source, dropping: Sequence[Op]) -> int | None:
    """Of one op that drops rows by their numbers, as a fold of files does; not of several, which would have to be tried
    on every row."""
    if isinstance(source, Indexed):
        return None if dropping else len(source)
    if not isinstance(source, Blocks) or len(dropping) > 1:
        return None
    if dropping:
        [op] = dropping
        kept: int | None = op.num_kept(source.blocks()) if hasattr(op, "num_kept") else None
        return kept
    sizes = [block.rows for block in source.blocks()]
    return None if None in sizes else sum(filter(None, sizes))


class _Builder:
    def __init__(self, seed: int, knowledge: Knowledge, finish: Callable[[Rows], Rows], columns: Sequence[str] | None):
        self._seed, self._knowledge, self._finish, self._columns = seed, knowledge, finish, columns
        self._is_first = True
        """Whether what is made is read from the beginning of the epoch on, not in a later round."""
        self.lanes: list[Lane] = []
        self.batch_ops: list[tuple[Sequence[Op], Context]] = []

    def node(self, tree: Tree, epoch: int) -> Node:
        match tree:
            case Leaf():
                return self._leaf(tree, epoch)
            case Mixture(children, weights):
                return Together([self.node(child, epoch) for child in children], weights)
            case Repeated(child, times):
                return Chain([self._round(child, epoch * times + number, number) for number in range(times)])
            case First(child, size):
                return Head(self.node(child, epoch), size)

    def _round(self, child: Tree, epoch: int, number: int) -> Node:
        former, self._is_first = self._is_first, self._is_first and number == 0
        try:
            return self.node(child, epoch)
        finally:
            self._is_first = former

    def _leaf(self, leaf: Leaf, epoch: int) -> Node:
        seed = self._seed if leaf.shuffle is None or leaf.shuffle.seed is None else leaf.shuffle.seed
        context = Context(leaf.name, derived_seed("draws", seed, leaf.number), epoch, id_column=leaf.id_column)
        shuffled = None if leaf.shuffle is None else derived_seed("order", seed, leaf.number, epoch)
        block_ops, batch_ops = leaf.stages()
        first_id = leaf.number << _ID_BITS
        if isinstance(leaf.source, Stream):
            return self._add(StreamLane(len(self.lanes), leaf.source, block_ops, context, first_id), batch_ops, context)
        if isinstance(leaf.source, Indexed) and not block_ops:
            order = None if shuffled is None else Permutation(len(leaf.source), shuffled)
            return self._add(IndexLane(len(self.lanes), leaf.source, order, context, first_id), batch_ops, context)
        return self._blocks(leaf, shuffled, block_ops, batch_ops, context)

    def _add(self, lane: Lane, batch_ops: Sequence[Op], context: Context) -> Lane:
        self.lanes.append(lane)
        self.batch_ops.append((batch_ops, context))
        return lane

    def _blocks(
        self, leaf: Leaf, shuffled: int | None, block_ops: Sequence[Op], batch_ops: Sequence[Op], context: Context
    ) -> Node:
        reader = BlockReader(leaf, block_ops, batch_ops, context, shuffled, self._columns, self._finish)
        counts = self._knowledge.counts.setdefault(leaf.number, {}) if reader.counts_last else {}
        blocks = reader.prepare(counts)
        if shuffled is not None and reader.shuffles_blocks:
            order = Permutation(len(blocks), "blocks", shuffled)(np.arange(len(blocks)))
            blocks = [blocks[index] for index in order]
        per_unit = leaf.blocks_per_unit(blocks) if shuffled is not None else 1
        row_seed = shuffled if reader.shuffles_blocks else None
        finish = (lambda rows: rows) if batch_ops else self._finish
        lanes: list[BlockLane] = []
        every = spread(blocks, leaf.lanes)
        for index, one in enumerate(every):
            if self._is_first and per_unit == 1:
                one = reader.with_a_head(one, counts)
            units = units_of(one, per_unit, row_seed)
            seat = (index, len(every)) if self._is_first else None
            lane = BlockLane(len(self.lanes), units, reader.read, reader.count, counts, finish, seat)
            self._add(lane, batch_ops, context)
            lanes.append(lane)
        return Together(lanes, at_least=min(lane.num_known() for lane in lanes))


class BlockReader:
    """Reads blocks of a leaf, and does what can drop rows of it. An indexed dataset is read in blocks of its order."""

    def __init__(
        self,
        leaf: Leaf,
        ops: Sequence[Op],
        batch_ops: Sequence[Op],
        context: Context,
        shuffled: int | None,
        columns: Sequence[str] | None,
        finish: Callable[[Rows], Rows],
    ):
        self._leaf, self._ops, self._context = leaf, ops, context
        self.first_id = leaf.number << _ID_BITS
        self._source = leaf.source
        limited = any(isinstance(op, Limit) for op in ops)
        self.shuffles_blocks = isinstance(self._source, Blocks) or limited
        """Else their order is shuffled as a whole."""
        self._order: Permutation | None = None
        if isinstance(self._source, Indexed) and shuffled is not None and not limited:
            self._order = Permutation(len(self._source), shuffled)
        self.counts_last = self._order is None and not any(isinstance(op, Map | MapBatches) for op in ops)
        """Whether a block has as many rows in the next epoch: not if it is a stretch of a shuffled order, nor if a
        filter comes after a function that may draw random numbers."""
        self._columns = columns_of([*ops, *batch_ops], columns)

    def prepare(self, counts: dict[int, int]) -> list[Block]:
        """The blocks, of those that have rows. Limits are made into what they are for each block."""
        blocks = self._all_blocks()
        for place, op in enumerate(self._ops):
            if isinstance(op, Limit):
                quota = self._quota(op.size, self._ops[:place], blocks)
                self._ops = [*self._ops[:place], quota, *self._ops[place + 1 :]]
                blocks = [block for block in blocks if quota.quotas.get(block.number)]
        if not self._ops:
            for block in blocks:
                if block.rows is not None:
                    counts[block.number] = block.rows
        return blocks

    def with_a_head(self, blocks: list[Block], counts: dict[int, int]) -> list[Block]:
        """The same rows, those of the first block in two: the epoch begins when a few of them are read. Their order
        does not depend on it unless they are shuffled, and then the first rows stay first; other rows each epoch. Not
        if some are dropped, which goes by the numbers of whole blocks."""
        parts = (
            self._source.parted(blocks[0]) if blocks and not self._ops and isinstance(self._source, Parted) else None
        )
        if parts is None:
            return blocks
        counts |= {part.number: part.weight for part in parts}
        return [*parts, *blocks[1:]]

    def _all_blocks(self) -> list[Block]:
        if isinstance(self._source, Blocks):
            return list(self._source.blocks())
        size = len(self._source)  # type: ignore[arg-type]
        return [
            Block(
                number, f"{self._context.name}, from row {start} of its order", None, min(_VIRTUAL, size - start), start
            )
            for number, start in enumerate(range(0, size, _VIRTUAL))
        ]

    def _quota(self, size: int, ops: Sequence[Op], blocks: Sequence[Block]) -> Quota:
        quotas: dict[int, int] = {}
        for block in blocks:
            if size <= 0:
                break
            count = block.rows if block.rows is not None and not ops else len(self._read(block, ops, None)[0])
            quotas[block.number] = min(size, count)
            size -= count
        return Quota(quotas)

    def read(self, block: Block) -> Numbered:
        return self._read(block, self._ops, self._columns, self._context.id_column)

    def count(self, block: Block) -> int:
        """How many rows of it pass. Reads no more columns than that takes."""
        conditions = [op.condition for op in self._ops if isinstance(op, Filter) and not callable(op.condition)]
        if len(conditions) == len(self._ops) and hasattr(self._source, "count_matching"):
            return int(self._source.count_matching(block, conditions))
        if not self._ops and hasattr(self._source, "count"):
            return int(self._source.count(block))
        return len(self._read(block, self._ops, columns_of(self._ops, []))[0])

    def _read(
        self, block: Block, ops: Sequence[Op], columns: Sequence[str] | None, id_column: str | None = None
    ) -> Numbered:
        """With `id_column`, the numbers of rows have a second place: their names, as the column has them. Ops look at
        the numbers, so that a row draws the same whether it is named or not."""
        if isinstance(self._source, Blocks):
            wanted = with_column(columns, id_column, self._source.column_names())
            rows = self._source.read(block, wanted)
            numbers = block.first_id + np.arange(len(rows))
        else:
            slots = np.arange(block.first_row or 0, (block.first_row or 0) + block.weight)
            indices, wanted = slots if self._order is None else self._order(slots), None
            rows = self._source.take(indices)  # type: ignore[attr-defined]
            numbers = numbers_of(self._source, indices)  # type: ignore[arg-type]
        names = None if id_column is None else names_of(rows, id_column, block.name)
        if wanted is not None and columns != wanted and isinstance(rows, Columns):  # somebody else asked for it
            rows = rows.select([name for name in wanted if name != id_column])
        context = Context(block.name, self._context.seed, self._context.epoch, block.number)
        rows, ids = apply(ops, rows, numbers, context)
        if names is not None and len(ids) < len(names):
            names = names[np.isin(numbers, ids, assume_unique=True)]
        ids = ids + self.first_id if self.first_id else ids
        return rows, ids if names is None else np.stack([ids, names], 1)


def _named(rows: Rows, ids: Any, context: Context) -> tuple[Any, Any]:
    """The numbers of rows, and the names by which they are known outside: the same, or those of a column."""
    if context.id_column is None:
        return ids, ids
    if ids.ndim == 2:  # who has read it has seen the column, which may be gone by now
        return ids[:, 0], ids[:, 1]
    return ids, names_of(rows, context.id_column, context.name)


def columns_of(ops: Sequence[Op], wanted: Sequence[str] | None) -> list[str] | None:
    """The columns that have to be read for these ops, when `wanted` is what is asked for at the end; None: all."""
    needed: Any = wanted
    for op in reversed(ops):
        if op.columns is None:
            return None
        needed = op.columns if op.replaces_columns else (None if needed is None else [*needed, *op.columns])
    return None if needed is None else list(dict.fromkeys(needed))
