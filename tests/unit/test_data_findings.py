"""What a second reading of the data layer found: each of these was wrong once."""

import datetime
import functools
import logging
import operator
import re
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from paceline.data import as_dataset, from_numpy, mix, read_csv, read_parquet, sample_rng
from paceline.data.identity import identity_of
from paceline.data.plan import Knowledge
from paceline.data.shard import Shard
from paceline.errors import ArgumentError, DataError


def numbers(size):
    return from_numpy({"id": np.arange(size)})


def ids_of(batches):
    return [int(number) for batch in batches for number in batch["id"]]


# --- columns ----------------------------------------------------------------------------------------------------------


def test_files_may_have_their_columns_in_another_order(tmp_path):
    pq.write_table(pa.table({"a": [1.0], "b": [2.0], "y": [0.0]}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"y": [0.0], "b": [2.0], "a": [1.0]}), tmp_path / "2.parquet")
    [(x, y)] = read_parquet(tmp_path).to_torch(10)
    assert x.tolist() == [[1, 2], [1, 2]]
    assert y.tolist() == [0, 0]
    [x] = read_parquet(tmp_path).to_torch(10, feature_columns=["b", "a"], label_column=None)
    assert x.tolist() == [[2, 1], [2, 1]]


def test_mixture_of_other_columns_is_refused():
    one, other = from_numpy({"a": np.ones(3), "y": np.zeros(3)}), from_numpy({"y": np.zeros(3), "a": np.ones(3)})
    with pytest.raises(DataError, match="Rows with the columns a, y come together with rows that have y, a"):
        list(mix({one: 1, other: 1}).to_torch(6))
    [(x, _)] = mix({one: 1, other: 1}).to_torch(6, feature_columns=["a"], label_column="y")
    assert x.tolist() == [[1]] * 6
    with pytest.raises(DataError, match="come together with rows that have y"):
        list(mix({one: 1, other.select_columns("y"): 1}).iter_batches(6))


def test_compressed_files_with_other_columns_are_told(tmp_path):
    import gzip

    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"id,x\n1,2\n"))
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(b"id,y\n1,2\n"))
    with pytest.raises(DataError, match=r"b.csv.gz"):
        list(read_csv(tmp_path).iter_batches(4))


# --- filters ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_missing_numbers_are_missing_to_a_filter_on_every_rank(tmp_path, world_size):
    values = [None if number % 4 == 0 else float(number) for number in range(40)]
    pq.write_table(pa.table({"id": range(40), "x": values}), tmp_path / "a.parquet", row_group_size=5)
    data = read_parquet(tmp_path).filter(pc.field("x").is_valid())
    found = [
        number for rank in range(world_size) for number in ids_of(Shard(data.tree, rank, world_size).iter_batches(4))
    ]
    assert sorted(found) == [number for number in range(40) if number % 4]
    assert np.isnan(np.concatenate([batch["x"] for batch in read_parquet(tmp_path).iter_batches(7)])).sum() == 10


def test_times_of_a_zone_can_be_filtered():
    table = pa.table({"id": [1, 2], "when": pa.array([0, 10**9], pa.timestamp("us", "UTC"))})
    later = as_dataset(table).filter(pc.field("when") > pa.scalar(5, pa.timestamp("us", "UTC")))
    assert ids_of(later.iter_batches(4)) == [2]


def test_filter_that_says_otherwise_the_next_time_is_told(tmp_path):
    pq.write_table(pa.table({"id": range(60)}), tmp_path / "a.parquet", row_group_size=10)
    limit = [5]
    data = read_parquet(tmp_path, lanes=1).filter(lambda row: row["id"] % 10 < limit[0])
    first = Shard(data.tree)
    batches = iter(first.iter_batches(5))
    next(batches), next(batches)
    batches.close()
    limit[0] = 3
    shard = Shard(data.tree)
    shard.go_on([first.state()])
    with pytest.raises(DataError, match="3 rows are there now that pass the filters, and 5 when they were counted"):
        list(shard.iter_batches(5))


# --- identity ---------------------------------------------------------------------------------------------------------


def of(value):
    def fn(row):
        return row in value

    return fn


def keyword(default):
    return lambda row, *, least=default: row > least


class Callable:
    def __init__(self, least):
        self.least = least

    def __call__(self, row):
        return row > self.least


@pytest.mark.parametrize(
    ("make", "one", "other"),
    [
        (lambda value: functools.partial(max, default=value), 1, 2),
        (lambda value: pc.field("x").isin(value), [*range(100)], [*range(50), 7, *range(51, 100)]),
        (keyword, 1, 2),
        (of, {"a": 1}, {"a": 2}),
        (of, {1, 2, 3}, {1, 2, 4}),
        (of, np.arange(3), np.arange(4)),
        (Callable, 1, 2),
        (of, np.int64(1), np.int64(2)),
        (of, datetime.date(2020, 1, 1), datetime.date(2020, 1, 2)),
        (of, torch.tensor(1), torch.tensor(2)),
        (of, torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.zeros(1))),
        (of, Path("a"), Path("b")),
        (lambda value: Callable(value).__call__, 1, 2),
        (operator.itemgetter, "a", "b"),
        (lambda value: re.compile(value).match, "a", "b"),
    ],
    ids=[
        "partial",
        "expression",
        "keyword",
        "dict",
        "set",
        "array",
        "object",
        "number",
        "date",
        "tensor",
        "parameter",
        "path",
        "method",
        "getter",
        "pattern",
    ],
)
def test_functions_that_differ_in_what_they_hold_are_known_apart(make, one, other):
    assert identity_of(make(one)) == identity_of(make(one))
    assert identity_of(make(one)) != identity_of(make(other))


def test_modules_and_loggers_that_a_function_holds_are_known_by_their_names():
    """Whatever else they hold: what is imported, and how a process logs, is not the same everywhere."""

    def make():
        import torch as module

        log = logging.getLogger("some")
        return lambda row: (module, log)

    former = identity_of(make())
    torch.something = logging.getLogger("some").something = object()
    try:
        assert identity_of(make()) == former
    finally:
        del torch.something, logging.getLogger("some").something


def test_object_that_many_hold_is_looked_at_once():
    held = [1]
    for _ in range(60):
        held = [held, held]
    assert identity_of(of(held)) == identity_of(of(held))


def test_functions_that_call_each_other_have_one_identity():
    def make():
        def f(x):
            return f(x) or g(x)

        def g(x):
            return g(x) or f(x)

        return f

    def deep(depth):
        return identity_of(make()) if depth == 0 else deep(depth - 1)

    assert deep(0) == deep(40)


# --- memory -----------------------------------------------------------------------------------------------------------


def test_rounds_of_repeated_files_are_read_one_after_the_other(tmp_path, monkeypatch):
    pq.write_table(pa.table({"id": range(40)}), tmp_path / "a.parquet", row_group_size=5)
    data, read = read_parquet(tmp_path).repeat(50), []
    source = data.tree.child.source
    monkeypatch.setattr(source, "_table", lambda *place, table=source._table: read.append(place) or table(*place))
    batches = iter(data.iter_batches(4))
    next(batches)
    batches.close()
    assert len(read) <= 2 * 8


class Endless(IterableDataset):
    def __init__(self, first):
        self.first = first

    def __iter__(self):
        return iter(range(self.first, 10**9))


def test_mixed_streams_keep_nothing_that_others_have(monkeypatch):
    from paceline.data import lanes

    made = []
    monkeypatch.setattr(lanes.StreamLane, "skip_to", lambda self, number: None)
    former = lanes.StreamLane.__init__
    monkeypatch.setattr(lanes.StreamLane, "__init__", lambda self, *args: made.append(self) or former(self, *args))
    data = mix({as_dataset(Endless(0)): 1, as_dataset(Endless(10**6)): 1})
    for number, _ in enumerate(Shard(data.tree, 0, 2).iter_batches(10)):
        if number == 30:
            break
    assert len(made) == 2
    assert max(len(lane._kept) for lane in made) <= 40


# --- batches ----------------------------------------------------------------------------------------------------------


def test_rank_without_rows_has_a_batch_of_its_shape():
    data = as_dataset(TensorDataset(torch.ones(9, 2), torch.ones(9)))
    sizes = []
    for rank in range(4):
        for x, y in Shard(data.tree, rank, 4).to_torch(2):
            assert (x.shape[1:], y.shape[1:]) == ((2,), ())
            sizes.append(len(x))
    assert sorted(sizes) == [0, 0, 0, 1, 2, 2, 2, 2]
    arrays = [batch for rank in range(4) for batch in Shard(data.tree, rank, 4).iter_batches(2)]
    assert all(isinstance(batch, tuple) and len(batch) == 2 for batch in arrays)


def test_option_that_would_mix_up_the_order_is_refused():
    with pytest.raises(ArgumentError, match="in_order"):
        numbers(8).to_torch(1, num_workers=2, in_order=False)


class Drawing(Dataset):
    def __len__(self):
        return 5

    def __getitem__(self, index):
        return sample_rng().random() == sample_rng(index).random()


def test_row_that_is_read_is_known_in_a_dataset():
    assert [value for batch in as_dataset(Drawing()).iter_batches(2) for value in batch.tolist()] == [True] * 5


def test_too_many_datasets_are_refused():
    with pytest.raises(ArgumentError, match="At most 127 datasets can be mixed"):
        mix({numbers(1): 1 for _ in range(128)})


# --- positions --------------------------------------------------------------------------------------------------------


def test_sizes_that_changed_between_epochs_are_kept():
    """Rank 0 is an epoch ahead, with larger batches."""
    tree, had = numbers(100).tree, []
    first, second = Shard(tree, 0, 2), Shard(tree, 1, 2)
    had += [(0, number) for number in ids_of(first.iter_batches(5))]
    ahead = iter(first.iter_batches(7))
    had += [(1, number) for number in ids_of([next(ahead)])]
    behind = iter(second.iter_batches(5))
    had += [(0, number) for number in ids_of([next(behind), next(behind)])]
    last = Shard(tree)
    last.go_on([first.state(), second.state()])
    for batch in last.iter_batches(10, epochs=2):
        had += [(last.epoch, number) for number in ids_of([batch])]
    assert sorted(had) == [(epoch, number) for epoch in range(2) for number in range(100)]


GOOD = {"epoch": 1, "stop": 5, "size": 5, "rank": 0, "world_size": 2, "begun": [[1, 5, [[[5, 10, 5, 0, 2]]]]]}


@pytest.mark.parametrize(
    "damage",
    [
        {"epoch": "a"},
        {"epoch": -1},
        {"stop": "x"},
        {"stop": -5},
        {"size": 0},
        {"world_size": 0},
        {"rank": 2},
        {"rank": True},
        {"begun": [[1, 2]]},
        {"begun": [[1, 5, [[[5, 10, 0, 0, 2]]]]]},
        {"begun": [[10**9, 5, []]]},
        {"counts": [1]},
        {"counts": {"0": [[1], [2, 3]]}},
        {"counts": {"0": [[1], [-2]]}},
        {"sizes": [[0, 0]]},
        {"sizes": 3},
    ],
    ids=str,
)
def test_damaged_positions_are_told(damage):
    Shard(numbers(10).tree).go_on([GOOD])
    with pytest.raises(DataError, match="cannot be read"):
        Shard(numbers(10).tree).go_on([{**GOOD, **damage}])
    with pytest.raises(DataError, match="epochs apart"):
        Shard(numbers(10).tree).go_on([GOOD, {**GOOD, "epoch": 10**9, "begun": []}])


def test_what_is_learned_can_be_saved_while_threads_learn():
    knowledge, is_over = Knowledge({0: {}}), threading.Event()

    def learn():
        for number in range(200_000):
            if is_over.is_set():
                return
            knowledge.counts[0][number] = number

    thread = threading.Thread(target=learn)
    thread.start()
    try:
        for _ in range(20):
            blocks, counts = knowledge.as_state()["0"]
            assert blocks.tolist() == counts.tolist()
    finally:
        is_over.set()
        thread.join()
