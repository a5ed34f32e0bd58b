"""Which rows come next, and whose they are: for any tree of lanes, any numbers of ranks and any points of failure."""

from itertools import chain

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data.dealing import Chain, Head, Mark, Range, Standing, Together, batches, cut, merge, without

sizes = st.lists(st.integers(0, 12), min_size=1, max_size=6)


class Lane:
    """So many rows. Notes how many it was asked for."""

    def __init__(self, number, size):
        self.number, self.size, self.asked = number, size, 0

    def count_up_to(self, limit):
        self.asked = max(self.asked, limit)
        return min(self.size, limit)

    def ranges(self, start, stop):
        assert 0 <= start < stop <= self.size
        return [Range(self.number, start, stop)]


def lanes_of(sizes, first=0):
    return [Lane(first + number, size) for number, size in enumerate(sizes)]


def rows_of(ranges):
    return [(lane, row) for lane, start, stop in ranges for row in range(start, stop)]


@st.composite
def trees(draw):
    """A tree, and all of its rows."""
    lanes = lanes_of(draw(sizes))
    weights = draw(st.none() | st.lists(st.integers(1, 5), min_size=len(lanes), max_size=len(lanes)))
    tree, every = Together(lanes, weights), [(lane.number, row) for lane in lanes for row in range(lane.size)]
    kind = draw(st.sampled_from(["together", "chain", "head", "nested"]))
    more = lanes_of(draw(sizes), first=100)
    others = [(lane.number, row) for lane in more for row in range(lane.size)]
    if kind == "chain":
        return Chain([tree, Together(more)]), every + others
    if kind == "nested":
        return Together([tree, Together(more)], [draw(st.integers(1, 9)), draw(st.integers(1, 9))]), every + others
    if kind == "head":
        size = draw(st.integers(0, len(every) + 2))
        return Head(tree, size), rows_of(tree.ranges(0, min(size, len(every))))
    return tree, every


@given(trees(), st.data())
def test_tree_gives_each_row_once_in_an_order_that_no_batch_size_changes(made, data):
    tree, every = made
    assert tree.count_up_to(10**6) == len(every)
    one_by_one = [row for number in range(len(every)) for row in rows_of(tree.ranges(number, number + 1))]
    assert sorted(one_by_one) == sorted(every)
    start = data.draw(st.integers(0, len(every)))
    stop = data.draw(st.integers(start, len(every)))
    assert sorted(rows_of(tree.ranges(start, stop))) == sorted(one_by_one[start:stop])
    assert tree.count_up_to(stop) == stop


@given(st.lists(st.integers(1, 9), min_size=2, max_size=4), st.integers(1, 60))
def test_mixture_keeps_its_proportions_as_long_as_there_are_rows(weights, done):
    counts = [0] * len(weights)
    for lane, start, stop in Together(lanes_of([1000] * len(weights)), weights).ranges(0, done):
        counts[lane] = stop - start
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count - done * weight / sum(weights)) <= 1


def test_rows_are_not_counted_further_than_needed():
    lanes = lanes_of([100] * 4)
    assert Together(lanes).count_up_to(20) == 20
    assert max(lane.asked for lane in lanes) <= 6, "counting may mean reading"


@given(sizes, st.integers(1, 5))
def test_parts_follow_each_other_and_differ_by_a_row_at_most(sizes, num_parts):
    ranges = [Range(lane, 0, size) for lane, size in enumerate(sizes) if size]
    parts = [rows_of(cut(ranges, part, num_parts)) for part in range(num_parts)]
    assert list(chain(*parts)) == rows_of(ranges)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20), st.integers(0, 6)), max_size=8))
def test_what_was_had_is_left_out(pieces):
    taken, had = {}, set()
    for lane, start, size in pieces:
        new = [row for row in range(start, start + size) if (lane, row) not in had]
        had |= {(lane, row) for row in new}
        taken.setdefault(lane, []).extend((row, row + 1) for row in new)
    taken = {lane: sorted(intervals) for lane, intervals in taken.items()}
    ranges = [Range(lane, 3, 22) for lane in range(4)]
    assert rows_of(without(ranges, taken)) == [row for row in rows_of(ranges) if row not in had]


class Ranks:
    """Ranks that read without waiting for each other, fail, and go on in other numbers."""

    def __init__(self, tree, num_epochs):
        self.tree, self.num_epochs = tree, num_epochs
        self.marks, self.had = {0: Mark()}, []

    def attempt(self, world_size, size, steps):
        """Each rank makes so many steps; then all of them fail, and what they have saved is merged."""
        standings = [
            self._read(rank, world_size, size, num) for rank, num in zip(range(world_size), steps, strict=True)
        ]
        self.marks = merge(standings)

    def _read(self, rank, world_size, size, num_steps):
        epoch = min(self.marks)
        stop, items = None, batches(self.tree, self.marks[epoch], size, "uneven")
        while num_steps and epoch < self.num_epochs:
            batch = next(items, None)
            if batch is None:
                epoch, stop = epoch + 1, None
                items = batches(self.tree, self.marks.get(epoch, Mark()), size, "uneven")
                continue
            self.had += [(epoch, *row) for row in rows_of(batch.share(rank, world_size))]
            stop, num_steps = batch.stop, num_steps - 1
        return Standing(epoch, stop, size, rank, world_size, self.marks)

    def finish(self):
        for epoch in range(min(self.marks), self.num_epochs):
            for batch in batches(self.tree, self.marks.get(epoch, Mark()), 7, "uneven"):
                self.had += [(epoch, *row) for row in rows_of(batch.ranges)]


@given(trees(), st.data())
@settings(max_examples=300)
def test_every_row_of_every_epoch_counts_once_whatever_fails(made, data):
    tree, every = made
    ranks = Ranks(tree, num_epochs=3)
    for _ in range(data.draw(st.integers(1, 5))):
        world_size, size = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9))
        together = data.draw(st.booleans())
        steps = [data.draw(st.integers(0, 7))] * world_size
        if not together:
            steps = [data.draw(st.integers(0, 7)) for _ in range(world_size)]
        ranks.attempt(world_size, size, steps)
    ranks.finish()
    assert sorted(ranks.had) == sorted((epoch, *row) for epoch in range(3) for row in every)


def test_ranks_in_step_leave_a_position_of_one_number():
    ranks = Ranks(Together(lanes_of([50, 50])), num_epochs=1)
    ranks.attempt(4, 8, [3] * 4)
    assert ranks.marks == {0: Mark(24)}
    ranks.attempt(3, 6, [2] * 3)
    assert ranks.marks == {0: Mark(36)}


def test_rank_that_reads_nothing_of_a_dataset_has_no_say():
    reading = Standing(2, 40, 10, 0, 2)
    assert merge([reading, Standing(0, None, None, 1, 2)]) == {2: Mark(40)}
    assert merge([]) == {}


def test_padding_gives_every_rank_equally_many_rows():
    [*_, last] = batches(Together(lanes_of([5, 6])), Mark(), 8, "pad")
    shares = [[*rows_of(last.share(rank, 3)), *rows_of(last.filling(rank, 3))] for rank in range(3)]
    assert [len(share) for share in shares] == [2, 3, 3]
    assert last.num_rows == 3
    assert [len(rows_of(batch.ranges)) for batch in batches(Together(lanes_of([5, 6])), Mark(), 8, "drop")] == [8]
