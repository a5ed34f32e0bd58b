"""How rows are dealt: which come next, whose they are, and what is left when ranks were not equally far. Pure.

An epoch is a tree. Its leaves are lanes: places of the data that are read one row after the other. Its nodes say in
which order their rows come; that follows from how many rows each lane has, and from nothing else: not from the number
of ranks, nor from the size of batches. So "the first `done` rows of the epoch" means the same to everybody, and any
rank can find any batch by itself.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, lcm
from typing import Literal, NamedTuple, Protocol

from paceline.errors import DataError

Rest = Literal["uneven", "pad", "drop"]


class Range(NamedTuple):
    """Rows of one lane, by their numbers in it."""

    lane: int
    start: int
    stop: int


class Node(Protocol):
    def count_up_to(self, limit: int) -> int:
        """How many rows there are; `limit` if there are more. Counts no further than it must, since it may have to
        read for that."""
        ...

    def ranges(self, start: int, stop: int) -> list[Range]:
        """Rows `start` to `stop` of those that are there, lane by lane."""
        ...


class Together:
    """Rows come from all nodes at once, from each as often as its weight says. One that has no more is left out, and
    the others go on: at the end, each row has come once.

    Row i of a node with weight w has its turn at (2 i + 1) / w. Of those whose turn it is at once, the first node is
    first.
    """

    def __init__(self, nodes: Sequence[Node], weights: Sequence[int] | None = None, at_least: int = 0):
        """`at_least`: so many rows each node has, as far as that is known without asking."""
        self._nodes = nodes
        weights = weights or [1] * len(nodes)
        self._unit = lcm(*weights) if weights else 1
        self._strides = [self._unit // weight for weight in weights]
        self._totals: list[int | None] = [None] * len(nodes)
        """Of the nodes whose end was seen."""
        self._latest = (0, 0, [0] * len(nodes))
        """For how many rows `_given` was asked last: how many, until when, how many of each."""
        self._before = self._latest
        """And the time before: a batch is asked for by its end, and then by its beginning."""
        self._sure = at_least if len({*weights}) == 1 else -1
        """So many rows all nodes have, at the least; as long as that is so, equal ones take turns. -1: they are not."""

    def count_up_to(self, limit: int) -> int:
        if limit <= 0:
            return 0
        counts = self._given(limit)
        return limit if counts is None else sum(counts)

    def ranges(self, start: int, stop: int) -> list[Range]:
        first, last = self._counts(start), self._counts(stop)
        return [
            part for node, a, b in zip(self._nodes, first, last, strict=True) if a < b for part in node.ranges(a, b)
        ]

    def _counts(self, done: int) -> list[int]:
        """Of each node, when `done` rows of all have come."""
        ends = self._given(done)
        return self._latest[2] if ends is None else ends

    def _given(self, done: int) -> list[int] | None:
        """Notes the state after so many rows. Gives the counts of all nodes instead if there are not so many."""
        if self._latest[0] != done:
            self._latest, self._before = self._before, self._latest
        if self._latest[0] == done:
            return None
        if self._latest[0] < self._before[0] < done:  # it is nearer: looks on from there
            self._latest = self._before
        level, over = divmod(done, len(self._nodes) or 1)
        if level < self._sure or self._is_sure_of(level + 1):
            counts = [level + 1] * over + [level] * (len(self._nodes) - over)
            self._latest = (done, 2 * (level + (over > 0)) * self._strides[0] - self._strides[0], counts)
            return None
        while True:
            turn = self._turn_of(done)
            if turn is None:
                return [total or 0 for total in self._totals]
            if self._see_ends(turn):
                break
        before = [self._num_before(number, turn) for number in range(len(self._nodes))]
        missing = done - sum(before)
        for number, stride in enumerate(self._strides):
            if missing and self._has_turn(number, stride, turn, before[number]):
                before[number] += 1
                missing -= 1
        self._latest = (done, turn, before)
        return None

    def _is_sure_of(self, level: int) -> bool:
        if self._sure < 0 or not self._nodes:
            return False
        wanted = [node.count_up_to(level) for node in self._nodes]
        self._sure = level if min(wanted) == level else -1
        return self._sure == level

    def _turn_of(self, done: int) -> int | None:
        """The first turn at which so many rows have come, as far as the ends are known; None if they never have."""
        if all(total is not None for total in self._totals) and sum(filter(None, self._totals)) < done:
            return None
        had, turn, counts = self._latest if self._latest[0] < done else (0, 1, [0] * len(self._nodes))
        ended = [count == total for count, total in zip(counts, self._totals, strict=True)]
        rate = sum(self._unit // stride for stride, is_over in zip(self._strides, ended, strict=True) if not is_over)
        # So far it can be skipped: in 2 units of turns `rate` rows come, and of each node perhaps one more.
        skip = max(0, (done - had - len(self._nodes) - 1) * 2 * self._unit // rate)
        low, step = turn - 1 + skip, 1
        while self._num_up_to(low + step) < done:
            low, step = low + step, step * 2
        high = low + step
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._num_up_to(middle) < done else (low, middle)
        return high

    def _see_ends(self, turn: int) -> bool:
        """Whether all nodes whose end is not known have as many rows as that turn asks for."""
        is_enough = True
        for number, node in enumerate(self._nodes):
            if self._totals[number] is None:
                wanted = self._num_before(number, turn) + 1
                count = node.count_up_to(wanted)
                if count < wanted:
                    self._totals[number], is_enough = count, False
        return is_enough

    def _num_up_to(self, turn: int) -> int:
        return sum(self._num_before(number, turn + 1) for number in range(len(self._nodes)))

    def _num_before(self, number: int, turn: int) -> int:
        """Rows of that node whose turn is before that one."""
        count = max(0, ((turn - 1) // self._strides[number] + 1) // 2)
        total = self._totals[number]
        return count if total is None else min(count, total)

    def _has_turn(self, number: int, stride: int, turn: int, count: int) -> bool:
        total = self._totals[number]
        return (2 * count + 1) * stride == turn and (total is None or count < total)


class Chain:
    """One node after the other."""

    def __init__(self, nodes: Sequence[Node]):
        self._nodes = nodes

    def count_up_to(self, limit: int) -> int:
        count = 0
        for node in self._nodes:
            if count >= limit:
                break
            count += node.count_up_to(limit - count)
        return min(count, limit)

    def ranges(self, start: int, stop: int) -> list[Range]:
        found: list[Range] = []
        for node in self._nodes:
            if stop <= 0:
                break
            count = node.count_up_to(stop)
            if start < count:
                found += node.ranges(max(start, 0), min(stop, count))
            start, stop = start - count, stop - count
        return found


class Head:
    """The first rows of another node."""

    def __init__(self, node: Node, size: int):
        self._node, self._size = node, size

    def count_up_to(self, limit: int) -> int:
        return self._node.count_up_to(min(limit, self._size))

    def ranges(self, start: int, stop: int) -> list[Range]:
        return self._node.ranges(start, min(stop, self._size))


class Deal(NamedTuple):
    """By which rule a rank took rows: its share of each batch of `size` rows, from row `start` of the epoch's order up
    to row `stop`; None is the end."""

    start: int
    stop: int | None
    size: int
    rank: int
    world_size: int


@dataclass(frozen=True)
class Mark:
    """How much of an epoch was had: the first `done` rows, and what some ranks took beyond. `ahead` has the deals of
    each attempt that ended before all ranks were equally far; each attempt dealt what those before had left."""

    done: int = 0
    ahead: tuple[tuple[Deal, ...], ...] = ()

    def trimmed(self) -> "Mark":
        """Without what is behind."""
        deals = [deal for attempt in self.ahead for deal in attempt]
        return Mark(self.done) if all(deal.stop is not None and deal.stop <= self.done for deal in deals) else self


Marks = Mapping[int, Mark]
"""By epoch, how much of it was had; the first one is the one to go on with."""


@dataclass(frozen=True)
class Standing:
    """How far one rank is in an attempt: up to row `stop` of `epoch`, of which it takes its share of each batch of
    `size` rows. `stop` is None if it has not begun with that epoch, `size` if it has not begun at all."""

    epoch: int
    stop: int | None
    size: int | None
    rank: int
    world_size: int
    begun: Marks = field(default_factory=dict)
    """Where the attempt began."""
    sizes: tuple[tuple[int, int], ...] = ()
    """From which epoch on batches had which size, if they had several."""

    def size_in(self, epoch: int) -> int | None:
        return next((size for first, size in reversed(self.sizes) if first <= epoch), self.size)

    def deal(self, epoch: int, start: int) -> Deal | None:
        """What it has taken of an epoch beyond that row."""
        size = self.size_in(epoch)
        if size is None or epoch > self.epoch or (epoch == self.epoch and (self.stop is None or self.stop <= start)):
            return None
        return Deal(start, self.stop if epoch == self.epoch else None, size, self.rank, self.world_size)

    def stop_in(self, epoch: int) -> float:
        if epoch < self.epoch:
            return inf
        if epoch == self.epoch and self.stop is not None:
            return self.stop
        return self.begun.get(epoch, Mark()).done


def merge(standings: Iterable[Standing]) -> dict[int, Mark]:
    """Where to go on: nothing is left out and nothing comes twice, however far apart the ranks were. Who has not begun
    to read at all does not read this data, if others do."""
    every = list(standings)
    reading = [one for one in every if one.size is not None] or every
    if not reading:
        return {}
    first, last = min(one.epoch for one in reading), max(one.epoch for one in reading)
    later = [epoch for one in reading for epoch in one.begun if epoch > last]
    return {epoch: _merged(epoch, reading) for epoch in [*range(first, last + 1), *sorted({*later})]}


def _merged(epoch: int, standings: Sequence[Standing]) -> Mark:
    begun = next((one.begun[epoch] for one in standings if epoch in one.begun), Mark())
    done = int(min(one.stop_in(epoch) for one in standings))
    # Batches begin at the same rows on all ranks: what one had beyond `done` are its shares of those from there on.
    ahead = tuple(filter(None, (one.deal(epoch, done) for one in standings)))
    return Mark(done, (*begun.ahead, ahead) if ahead else begun.ahead).trimmed()


def batches(node: Node, mark: Mark, size: int, rest: Rest) -> Iterator["Batch"]:
    """Of what is left of an epoch, for all ranks together. One that was had already is left out."""
    taken, start = _taken(node, mark), mark.done
    if node.count_up_to(start) < start:
        raise DataError(
            f"A checkpoint's position in the data is row {start} of an epoch that has {node.count_up_to(start)}: it is "
            "damaged, or a filter says something else of the rows now."
        )
    while True:
        stop = node.count_up_to(start + size)
        if stop <= start or (rest == "drop" and stop < start + size):
            return
        left = without(node.ranges(start, stop), taken)
        if left:
            yield Batch(start, stop, left, _padding(node, size) if rest == "pad" and stop < start + size else [], size)
        if stop < start + size:
            return
        start = stop


class Batch(NamedTuple):
    """Rows `start` to `stop` of the epoch's order, without those that were had already; and the rows by which the last
    one is filled up to `size`, if it is."""

    start: int
    stop: int
    ranges: list[Range]
    padding: list[Range]
    size: int

    @property
    def num_rows(self) -> int:
        return num_rows(self.ranges)

    def share(self, rank: int, world_size: int) -> list[Range]:
        return cut(self.ranges, rank, world_size)

    def filling(self, rank: int, world_size: int) -> list[Range]:
        """The rows that come again, after its share, so that all ranks have equally many."""
        if not self.padding:
            return []
        missing = [
            num_rows(cut(self.padding, one, world_size)) - num_rows(self.share(one, world_size))
            for one in range(rank + 1)
        ]
        return between(self.padding, sum(missing[:rank]), sum(missing))


def num_rows(ranges: Iterable[Range]) -> int:
    return sum(one.stop - one.start for one in ranges)


def cut(ranges: Sequence[Range], part: int, num_parts: int) -> list[Range]:
    """One of equal parts, to within a row, that follow each other."""
    total = num_rows(ranges)
    return between(ranges, part * total // num_parts, (part + 1) * total // num_parts)


def between(ranges: Iterable[Range], start: int, stop: int) -> list[Range]:
    """The rows from the start-th on, up to the stop-th."""
    found, passed = [], 0
    for lane, a, b in ranges:
        low, high = a + max(start - passed, 0), min(b, a + stop - passed)
        if low < high:
            found.append(Range(lane, low, high))
        passed += b - a
    return found


Taken = dict[int, list[tuple[int, int]]]
"""By lane, the rows that were had, as disjoint intervals in ascending order."""


def without(ranges: Iterable[Range], taken: Taken) -> list[Range]:
    if not taken:
        return list(ranges)
    left = []
    for lane, start, stop in ranges:
        for a, b in taken.get(lane, ()):
            if b <= start or a >= stop:
                continue
            if start < a:
                left.append(Range(lane, start, a))
            start = max(start, b)
        if start < stop:
            left.append(Range(lane, start, stop))
    return left


def _taken(node: Node, mark: Mark) -> Taken:
    """What the ranks that were ahead have had, attempt by attempt."""
    taken: Taken = {}
    for deals in mark.ahead:
        found = [part for deal in deals for part in _dealt(node, deal, taken)]
        for lane, start, stop in found:
            intervals = taken.setdefault(lane, [])
            intervals.insert(bisect_right(intervals, (start, stop)), (start, stop))
    return taken


def _dealt(node: Node, deal: Deal, taken: Taken) -> Iterator[Range]:
    start = deal.start
    while deal.stop is None or start < deal.stop:
        stop = node.count_up_to(start + deal.size)
        if stop <= start:
            return
        yield from cut(without(node.ranges(start, stop), taken), deal.rank, deal.world_size)
        start = stop


def _padding(node: Node, size: int) -> list[Range]:
    """The epoch's first rows, over and over if there are few."""
    found: list[Range] = []
    while size > 0:
        count = node.count_up_to(size)
        found += node.ranges(0, count)
        size -= count
    return found
