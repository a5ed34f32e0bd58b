"""One suite for every kind of dataset: what `Source` promises holds for each, and what is built on it: each row once,
in one order, for any number of ranks."""

import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
import pytest
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from paceline import registry
from paceline.data import as_dataset, from_numpy, read_csv, read_json, read_parquet
from paceline.data.base import Blocks, Indexed, Stream
from paceline.data.shard import Shard
from paceline.data.tree import leaves
from paceline.errors import ArgumentError, DataError

NUM_ROWS = 103


@dataclass
class Kit:
    """How the suite makes a dataset of the numbers below `NUM_ROWS`, in a folder that it may use. A new kind of dataset
    adds its own to `KITS`. The rows are dicts with "id", or they are the numbers."""

    make: Callable[[Any], Any]
    access: type
    has_columns: bool = True


def arrow_table():
    import pyarrow as pa

    return pa.table({"id": np.arange(NUM_ROWS), "text": [f"row {number}" for number in range(NUM_ROWS)]})


def parquet_files(folder):
    import pyarrow.parquet as pq

    pq.write_table(arrow_table().slice(0, 60), folder / "a.parquet", row_group_size=7)
    pq.write_table(arrow_table().slice(60), folder / "b.parquet", row_group_size=11)
    return read_parquet(folder)


def csv_files(folder):
    arrow_table().to_pandas().to_csv(folder / "a.csv", index=False)
    return read_csv(folder / "a.csv", block_bytes=100)


def json_files(folder):
    arrow_table().to_pandas().to_json(folder / "a.jsonl", orient="records", lines=True)
    return read_json(folder / "*.jsonl", block_bytes=200)


class Numbers(Dataset):
    def __len__(self):
        return NUM_ROWS

    def __getitem__(self, index):
        return index


class NumberStream(IterableDataset):
    """Divides itself among a loader's processes, as torch's documentation shows."""

    def __iter__(self):
        worker = get_worker_info()
        return iter(range(NUM_ROWS) if worker is None else range(worker.id, NUM_ROWS, worker.num_workers))


def huggingface_dataset(folder):
    import datasets

    return datasets.Dataset.from_dict({"id": list(range(NUM_ROWS))})


KITS = {
    "arrow": Kit(lambda folder: arrow_table(), Indexed),
    "csv": Kit(csv_files, Blocks),
    "huggingface": Kit(huggingface_dataset, Indexed),
    "huggingface_stream": Kit(lambda folder: huggingface_dataset(folder).to_iterable_dataset(), Stream),
    "json": Kit(json_files, Blocks),
    "numpy": Kit(lambda folder: from_numpy({"id": np.arange(NUM_ROWS)}), Indexed),
    "pandas": Kit(lambda folder: arrow_table().to_pandas(), Indexed),
    "parquet": Kit(parquet_files, Blocks),
    "torch": Kit(lambda folder: Numbers(), Indexed, has_columns=False),
    "torch_stream": Kit(lambda folder: NumberStream(), Stream, has_columns=False),
}


@pytest.fixture(scope="module", params=registry.names("dataset"))
def name(request):
    assert request.param in KITS, f"the dataset {request.param!r} is not under contract: add it to KITS in {__file__}"
    return request.param


@pytest.fixture(scope="module")
def kit(name):
    return KITS[name]


@pytest.fixture(scope="module")
def dataset(kit, tmp_path_factory):
    return as_dataset(kit.make(tmp_path_factory.mktemp("data")))


@pytest.fixture(scope="module", params=["in order", "shuffled"])
def either(request, dataset, kit):
    """As it is, and shuffled if it can be."""
    if request.param == "in order" or kit.access is Stream:
        return dataset
    return dataset.random_shuffle(window=20)


def numbers(batch):
    return [int(number) for number in (batch["id"] if isinstance(batch, dict) else batch)]


def ids_of(row):
    return row["id"] if isinstance(row, dict) else row


def epoch_of(dataset, world_size, epoch=0, **options):
    """Its batches: for each, the numbers of all ranks."""
    shards = [Shard(dataset.tree, rank, world_size) for rank in range(world_size)]
    for _ in range(epoch):
        for shard in shards:
            list(shard.iter_batches(**options))
    return [
        [numbers(batch) for batch in step]
        for step in zip(*(shard.iter_batches(**options) for shard in shards), strict=True)
    ]


def test_source_is_the_one_that_the_registry_names(name, kit, dataset):
    [leaf] = leaves(dataset.tree)
    assert type(leaf.source) is registry.find("dataset", name)
    assert isinstance(leaf.source, kit.access)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_row_comes_once_and_ranks_differ_by_one_at_most(either, world_size):
    steps = epoch_of(either, world_size, global_batch_size=10)
    assert sorted(number for step in steps for own in step for number in own) == list(range(NUM_ROWS))
    assert all(max(map(len, step)) - min(map(len, step)) <= 1 for step in steps)
    assert [sum(map(len, step)) for step in steps] == [10] * 10 + [3]


def test_global_batches_are_the_same_for_any_number_of_ranks(either):
    alone = [set(own) for [own] in epoch_of(either, 1, global_batch_size=16)]
    for world_size in (2, 3, 5):
        steps = epoch_of(either, world_size, global_batch_size=16)
        assert [set().union(*step) for step in steps] == alone


def test_shuffled_order_is_another_one_in_each_epoch_and_the_same_in_each_run(dataset, kit):
    if kit.access is Stream:
        with pytest.raises(ArgumentError, match="from its first row on"):
            dataset.random_shuffle()
        return
    shuffled = dataset.random_shuffle(seed=5)
    first, second = epoch_of(shuffled, 1, batch_size=50), epoch_of(shuffled, 1, epoch=1, batch_size=50)
    assert first != second
    assert first == epoch_of(dataset.random_shuffle(seed=5), 1, batch_size=50)
    assert first != epoch_of(dataset.random_shuffle(seed=6), 1, batch_size=50)


@pytest.mark.parametrize("is_filtered", [False, True], ids=["all", "filtered"])
def test_epoch_goes_on_with_other_numbers_of_ranks(either, is_filtered):
    """From 4 ranks to 3 to 2 and back, after two or three batches each, of another size."""
    data = either.filter(lambda row: ids_of(row) % 3 > 0) if is_filtered else either
    had, states = [], []
    for world_size, size, num_steps in ((4, 8, 2), (3, 9, 3), (2, 10, 2), (4, 5, 1)):
        shards = [Shard(data.tree, rank, world_size) for rank in range(world_size)]
        for shard in shards:
            if states:
                shard.go_on(states)
            batches = iter(shard.iter_batches(global_batch_size=size))
            for _ in range(num_steps):
                had += numbers(next(batches))
        states = pickle.loads(pickle.dumps([shard.state() for shard in shards]))
    last = Shard(data.tree)
    last.go_on(states)
    had += [number for batch in last.iter_batches(5) for number in numbers(batch)]
    assert sorted(had) == [number for number in range(NUM_ROWS) if not is_filtered or number % 3]
    assert last.epoch == 1


def test_ranks_that_were_not_equally_far_have_had_each_row_once(either):
    """Ranks without collectives: at the checkpoint one of them is through with the epoch, another has just begun."""
    had, shards = [], [Shard(either.tree, rank, 3) for rank in range(3)]
    for shard, num_steps in zip(shards, (1, 4, 100), strict=True):
        for _, batch in zip(range(num_steps), shard.iter_batches(global_batch_size=9), strict=False):
            had += numbers(batch)
    states = [shard.state() for shard in shards]
    for rank in range(2):
        shard = Shard(either.tree, rank, 2)
        shard.go_on(states)
        assert shard.epoch == 0
        for batch in shard.iter_batches(global_batch_size=9):
            had += numbers(batch)
    assert sorted(had) == list(range(NUM_ROWS))


def test_operations(dataset, kit):
    doubled = dataset.map(lambda row: {"id": ids_of(row) * 2})
    assert sorted(n for b in doubled.iter_batches(10) for n in numbers(b)) == [2 * n for n in range(NUM_ROWS)]
    even = dataset.filter(lambda row: ids_of(row) % 2 == 0)
    assert sorted(n for b in even.iter_batches(10) for n in numbers(b)) == list(range(0, NUM_ROWS, 2))
    assert sorted(n for b in even.limit(4).iter_batches(10) for n in numbers(b)) == [0, 2, 4, 6]
    assert sorted(n for b in dataset.limit(5).iter_batches(2) for n in numbers(b)) == [0, 1, 2, 3, 4]
    twice = sorted(n for b in dataset.repeat(2).iter_batches(10) for n in numbers(b))
    assert twice == sorted([*range(NUM_ROWS)] * 2)
    if kit.has_columns:
        chosen = next(iter(dataset.select_columns("id").iter_batches(4)))
        assert list(chosen) == ["id"]
        tens = dataset.map_batches(lambda batch: {"id": batch["id"] * 10}, batch_size=8)
        assert sorted(n for b in tens.iter_batches(10) for n in numbers(b)) == [10 * n for n in range(NUM_ROWS)]


@pytest.mark.parametrize(("rest", "sizes"), [("uneven", [1, 1, 1]), ("pad", [4, 3, 3]), ("drop", None)])
def test_rest_of_an_epoch(dataset, rest, sizes):
    steps = epoch_of(dataset, 3, global_batch_size=10, rest=rest)
    assert len(steps) == (10 if rest == "drop" else 11)
    if sizes is not None:
        assert sorted(map(len, steps[-1]), reverse=True) == sizes
    whole = [number for step in steps[:10] for own in step for number in own]
    assert len(set(whole)) == 100


def test_loader_processes_change_nothing(dataset, name):
    data = dataset if KITS[name].access is Stream else dataset.random_shuffle()
    shards = [Shard(data.tree, 1, 2) for _ in range(2)]
    alone, many = (
        shard.to_torch(global_batch_size=20, collate_fn=list, num_workers=num, label_column=None)
        if not KITS[name].has_columns
        else shard.to_torch(global_batch_size=20, feature_columns=["id"], label_column=None, num_workers=num)
        for shard, num in zip(shards, (0, 2), strict=True)
    )
    for _ in range(2):
        for one, other in zip_longest(alone, many):
            assert np.asarray(one).tolist() == np.asarray(other).tolist()
            assert shards[0].state() == shards[1].state(), "what was loaded ahead does not count"


def test_it_travels_and_is_known_again(dataset):
    copy = pickle.loads(pickle.dumps(dataset))
    assert copy.fingerprint() == dataset.fingerprint()
    assert copy.fingerprint() != dataset.limit(5).fingerprint()
    assert sorted(n for b in copy.iter_batches(50) for n in numbers(b)) == list(range(NUM_ROWS))


def test_description_is_for_the_run_folder(dataset):
    told = dataset.map(len).describe()
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    assert told["ops"] == ["Map"]


def test_filter_that_drops_everything_is_told(dataset):
    with pytest.raises(DataError, match="there are no rows"):
        list(dataset.filter(lambda row: False).iter_batches(4))


def test_later_epochs_have_the_rows_of_the_first(either):
    """What was learned of one epoch, how many rows of a block pass, must not be held against another order."""
    odd = either.filter(lambda row: ids_of(row) % 2)
    shards = [Shard(odd.tree, rank, 2) for rank in range(2)]
    steps = [[numbers(batch) for batch in shard.iter_batches(global_batch_size=10, epochs=3)] for shard in shards]
    assert len(steps[0]) == len(steps[1]) == 3 * 6
    for epoch in range(3):
        seen = [number for own in steps for batch in own[epoch * 6 : epoch * 6 + 6] for number in batch]
        assert sorted(seen) == list(range(1, NUM_ROWS, 2))
