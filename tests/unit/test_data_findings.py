"""What a second reading of the data layer found: each of these was wrong once."""

import datetime
import functools
import gc
import logging
import operator
import pickle
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


@pytest.mark.parametrize("read", ["iter_torch_batches", "iter_batches"])
def test_lists_of_different_lengths_can_be_padded(read):
    table = pa.table({"ids": [[1], [2, 3], [4, 5, 6]], "names": [["a"], [], ["b", "c"]], "y": [0, 1, 0]})
    options = {} if read == "iter_torch_batches" else {"batch_format": "torch"}

    def collate(batch):
        return torch.nn.utils.rnn.pad_sequence(batch["ids"], batch_first=True), batch["names"], batch["y"]

    [(padded, names, y)] = getattr(as_dataset(table), read)(3, collate_fn=collate, **options)
    assert padded.tolist() == [[1, 0, 0], [2, 3, 0], [4, 5, 6]]
    assert names == [["a"], [], ["b", "c"]]
    assert y.tolist() == [0, 1, 0]


def test_lists_of_lists_and_missing_lists():
    nested = as_dataset(pa.table({"boxes": [[[1, 2], [3, 4]], [[5, 6]]]}))
    [boxes] = nested.iter_torch_batches(2, collate_fn=lambda batch: [one.tolist() for one in batch["boxes"]])
    assert boxes == [[[1, 2], [3, 4]], [[5, 6]]]
    with pytest.raises(DataError, match="'ids' has a missing value where others have a list"):
        list(as_dataset(pa.table({"ids": [[1], None]})).iter_torch_batches(2, collate_fn=len))


def test_categories_are_what_they_stand_for(tmp_path):
    import pandas as pd

    for number, order in enumerate(("ab", "ba")):  # the code of "a" differs
        frame = pd.DataFrame({"c": pd.Categorical([*order] * 3, categories=[*order]), "n": pd.Categorical([5, 7] * 3)})
        frame.to_parquet(tmp_path / f"{number}.parquet")
    for batch in (
        *read_parquet(tmp_path, lanes=1).iter_torch_batches(12),
        *as_dataset(pd.concat(map(pd.read_parquet, sorted(tmp_path.iterdir())))).iter_torch_batches(12),
    ):
        assert batch["c"] == [*"ababab", *"bababa"]
        assert batch["n"].tolist() == [5, 7] * 6
    for batch in read_parquet(tmp_path, lanes=1).iter_batches(6, "pandas"):
        assert not hasattr(batch["c"], "cat"), "codes that differ from file to file"


def test_arrays_of_text_and_of_lists():
    lists = np.empty(2, object)
    lists[:] = [[1], [2, 3]]
    data = from_numpy({"text": np.array(["a", "bb"]), "lists": lists, "words": np.array(["a", None], object)})
    [batch] = data.iter_torch_batches(2, collate_fn=dict)
    assert (batch["text"], batch["words"]) == (["a", "bb"], ["a", None])
    assert [one.tolist() for one in batch["lists"]] == [[1], [2, 3]]


def test_csv_without_a_line_of_names(tmp_path, caplog):
    (tmp_path / "rows.csv").write_text("0.5,1,2\n1.5,2,3\n2.5,3,4\n")
    names = ["x", "z", "y"]
    for options in ({}, {"block_bytes": 8}):
        batches = list(read_csv(tmp_path, column_names=names, **options).to_torch(3))
        assert torch.cat([x for x, _ in batches]).tolist() == [[0.5, 1], [1.5, 2], [2.5, 3]]
    assert not caplog.text
    assert len(next(iter(read_csv(tmp_path).iter_batches(3, "pandas")))) == 2
    assert "its first line holds numbers only, 0.5, 1, 2, and is taken for the names" in caplog.text


@pytest.mark.parametrize("header", ["0,1,2", "2019,2020,2021", "a,1.5,2"])
def test_csv_with_names_that_are_numbers(header, tmp_path, caplog):
    (tmp_path / "rows.csv").write_text(f"{header}\n1,2,3\n")
    assert len(next(iter(read_csv(tmp_path).iter_batches(3, "pandas")))) == 1
    assert not caplog.text


def test_columns_of_which_there_are_no_tensors_are_told():
    table = as_dataset(pa.table({"s": [{"a": 1}, {"a": 2}]}))
    with pytest.raises(DataError, match=r"'s' holds struct<a: int64> values, of which there are no tensors"):
        list(table.iter_torch_batches(2))


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


def test_rows_that_fill_up_are_not_what_the_user_made_of_them(tmp_path):
    pq.write_table(pa.table({"x": np.arange(5.0)}), tmp_path / "rows.parquet")
    seen = []
    for x in read_parquet(tmp_path).to_torch(3, label_column=None, rest="pad"):
        seen.append(x[:, 0].tolist())
        x += 100
    assert seen == [[0, 1, 2], [3, 4, 0]]


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


def test_other_subset_of_a_torch_dataset_is_other_data():
    whole = TensorDataset(torch.arange(20))

    def mark(seed, data=whole):
        half, _ = torch.utils.data.random_split(data, [10, 10], torch.Generator().manual_seed(seed))
        return as_dataset(half).fingerprint()

    assert mark(0) == mark(0) != mark(1)
    nested = [torch.utils.data.Subset(torch.utils.data.Subset(whole, part), [0, 1]) for part in ([1, 2], [3, 4])]
    assert as_dataset(nested[0]).fingerprint() != as_dataset(nested[1]).fingerprint()
    copied = pickle.loads(pickle.dumps(as_dataset(nested[0])))
    assert copied.fingerprint() == as_dataset(nested[0]).fingerprint()


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


def test_what_is_learned_can_be_saved_while_garbage_is_collected():
    """A collection runs whatever code is due, and so may let another thread learn, between any two allocations."""
    counts = dict.fromkeys(range(5000), 1)
    knowledge, threshold = Knowledge({0: counts}), gc.get_threshold()

    def learn(phase, info):
        counts[len(counts)] = 1

    gc.callbacks.append(learn)
    gc.set_threshold(1)
    try:
        state = knowledge.as_state()
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(learn)
    blocks, passing = state["0"]
    assert len(blocks) == len(passing) >= 5000
    assert len(counts) > 5000
