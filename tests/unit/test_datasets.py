"""What datasets give, and how: draws, formats, mixtures, processes, threads."""

import gc
import threading

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from paceline.data import as_dataset, from_numpy, mix, read_csv, read_parquet, sample_rng
from paceline.data.kinds import parquet
from paceline.data.shard import Shard
from paceline.errors import ArgumentError, DataError


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    ids = np.arange(400)
    table = pa.table({"id": ids, "x": (ids / 400).astype("f4"), "text": [f"row {number}" for number in ids]})
    pq.write_table(table.slice(0, 150), folder / "a.parquet", row_group_size=40)
    pq.write_table(table.slice(150), folder / "b.parquet", row_group_size=70)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parquet, "_LEAST_HEAD", 1)  # so that row groups of this size are parted too
        yield folder


def ids_of(batches):
    return [int(number) for batch in batches for number in batch["id"]]


def numbers(size, first=0):
    return from_numpy({"id": np.arange(first, first + size)})


# --- properties -------------------------------------------------------------------------------------------------------


@st.composite
def datasets(draw, files):
    """A dataset, its rows, and whether loader processes may read it too."""
    kind = draw(st.sampled_from(["index", "files", "stream", "mixture"]))
    if kind == "index":
        data, rows = numbers(draw(st.integers(1, 80))), None
    elif kind == "files":
        data = read_parquet(files / "a.parquet", lanes=draw(st.integers(1, 9)))
    elif kind == "stream":
        data = as_dataset(Counting(draw(st.integers(1, 60))))
    else:
        data = mix({numbers(draw(st.integers(1, 50))): draw(st.integers(1, 5)), read_parquet(files / "a.parquet"): 2})
        data = data.map(lambda row: {"id": row["id"]})
    if kind != "stream" and draw(st.booleans()):
        data = data.random_shuffle(window=draw(st.none() | st.integers(1, 200)))
    if draw(st.booleans()):
        modulus = draw(st.integers(2, 5))
        data = data.filter(lambda row: row["id"] % modulus != 1 or row["id"] == 1)
    if draw(st.booleans()):
        data = data.map(lambda row: {**row, "more": row["id"] * 2})
    if draw(st.booleans()) and kind != "stream":
        data = data.repeat(2)
    rows = sorted(ids_of(data.iter_batches(1000)))
    return data, rows


class Counting(torch.utils.data.IterableDataset):
    def __init__(self, size):
        self.size = size

    def __iter__(self):
        return ({"id": number} for number in range(self.size))


@settings(max_examples=40)
@given(st.data())
def test_rows_count_once_for_any_data_ranks_and_failures(files, data):
    dataset, rows = data.draw(datasets(files))
    states, had = [], []
    for _ in range(data.draw(st.integers(1, 4))):
        world_size = data.draw(st.integers(1, 4))
        size = data.draw(st.integers(world_size, 40))
        shards = [Shard(dataset.tree, rank, world_size) for rank in range(world_size)]
        in_step = data.draw(st.integers(1, 6))  # who has never begun to read has no part in the data
        for shard in shards:
            if states:
                shard.go_on(states)
            num_steps = in_step if data.draw(st.booleans()) else data.draw(st.integers(1, 6))
            for _, batch in zip(range(num_steps), shard.iter_batches(global_batch_size=size), strict=False):
                had += [(shard.epoch, number) for number in ids_of([batch])]
        states = [shard.state() for shard in shards]
    last = Shard(dataset.tree)
    last.go_on(states)
    num_epochs = last.epoch + 2
    for batch in last.iter_batches(50, epochs=num_epochs):
        had += [(last.epoch, number) for number in ids_of([batch])]
    for epoch in range(num_epochs):
        assert sorted(number for one, number in had if one == epoch) == rows


# --- draws ------------------------------------------------------------------------------------------------------------


class Augmented(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        return {"id": index, "draw": sample_rng(index).random()}


@pytest.mark.parametrize("kind", ["map", "dataset"])
def test_draws_are_the_same_wherever_a_row_is_read_and_differ_from_epoch_to_epoch(kind):
    if kind == "map":
        data = numbers(20).map(lambda row: {**row, "draw": sample_rng(row).random()}).random_shuffle()
    else:
        data = as_dataset(Augmented()).random_shuffle()

    def draws(world_size, num_workers=0):
        found = [{}, {}]
        for rank in range(world_size):
            shard = Shard(data.tree, rank, world_size)
            options = {"num_workers": num_workers} if num_workers else {}
            for epoch in range(2):
                for batch in shard.to_torch(3, collate_fn=lambda batch: batch, label_column="draw", **options):
                    rows = (
                        [(row["id"], row["draw"]) for row in batch]
                        if kind == "dataset"
                        else zip(*map(torch.Tensor.tolist, (batch[0][:, 0], batch[1])), strict=True)
                    )
                    found[epoch] |= dict(rows)
        return found

    alone = draws(1)
    assert len(alone[0]) == 20
    assert len({*alone[0].values(), *alone[1].values()}) == 40
    assert draws(3) == alone
    assert draws(2, num_workers=2) == alone


def test_filter_that_draws_keeps_the_same_rows_in_every_epoch():
    half = numbers(100).filter(lambda row: sample_rng(row).random() < 0.5).random_shuffle()
    batches = list(half.iter_batches(1000, epochs=2))
    assert sorted(batches[0]["id"]) == sorted(batches[1]["id"])
    assert 20 < len(batches[0]["id"]) < 80


# --- formats ----------------------------------------------------------------------------------------------------------


def test_formats(files):
    data = read_parquet(files)
    arrays, frame, table, tensors = (
        next(iter(data.iter_batches(8, kind))) for kind in ("numpy", "pandas", "pyarrow", "torch")
    )
    assert arrays["x"].dtype == np.float32
    assert frame["text"].tolist() == arrays["text"].tolist() == table["text"].to_pylist() == tensors["text"]
    assert tensors["id"].tolist() == arrays["id"].tolist()


def test_features_and_label(files):
    data = read_parquet(files, lanes=1)
    x, y = next(iter(data.to_torch(4, feature_columns=["x", "id"], label_column="id")))
    assert (x.shape, x.dtype, y.tolist()) == ((4, 2), torch.float32, [0, 1, 2, 3])
    x, y = next(iter(data.select_columns(["x", "id"]).to_torch(4)))
    assert (x.shape, y.tolist()) == ((4, 1), [0, 1, 2, 3]), "the last column is the label"
    x = next(iter(data.to_torch(4, feature_columns=["id"], label_column=None)))
    assert x.dtype == torch.int64
    with pytest.raises(ArgumentError, match="'text' holds object values, which are no features"):
        next(iter(data.to_torch(4, label_column="id")))


@pytest.mark.parametrize("column", [pa.array([[1, 2]] * 6), pa.array([[1, 2]] * 6, pa.list_(pa.uint8(), 2))])
def test_lists_of_equal_length_are_matrices(column):
    batch = next(iter(as_dataset(pa.table({"image": column})).iter_torch_batches(4)))
    assert batch["image"].tolist() == [[1, 2]] * 4


def test_expression_reads_only_what_it_needs(files):
    data = read_parquet(files).filter(pc.field("id") < 7)
    for rank in range(2):
        assert len(ids_of(Shard(data.tree, rank, 2).iter_batches(10))) in (3, 4)


def test_csv_with_line_ends_in_quotes_and_compressed(tmp_path):
    rows = "".join(f'{number},"two\nlines"\n' for number in range(50))
    (tmp_path / "a.csv").write_text("id,text\n" + rows)
    assert len(ids_of(read_csv(tmp_path / "a.csv", newlines_in_values=True, block_bytes=64).iter_batches(7))) == 50
    import gzip

    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(b"id;x\n1;2\n3;4\n"))
    assert ids_of(read_csv(tmp_path / "b.csv.gz", delimiter=";").iter_batches(7)) == [1, 3]


def test_resumed_epoch_reads_only_what_is_under_way(files, monkeypatch):
    """Also with a filter: how many rows of a row group pass it is part of the position."""
    data = read_parquet(files, lanes=2).filter(lambda row: row["id"] % 3)
    first = Shard(data.tree)
    batches = iter(first.iter_batches(50))
    for _ in range(4):
        next(batches)
    batches.close()
    shard, read = Shard(data.tree), []
    source = data.tree.source
    monkeypatch.setattr(source, "_table", lambda *place, table=source._table: read.append(place[:2]) or table(*place))
    shard.go_on([first.state()])
    items = iter(shard.iter_batches(50, prefetch_batches=0))
    next(items)
    items.close()
    assert len(read) <= 4, "of each lane the one under way, and one ahead"


# --- threads and processes --------------------------------------------------------------------------------------------


def test_epoch_may_be_ended_by_who_knows_that_it_is_over():
    """It has had the last batch, and does not ask for another; or it wants no more."""
    ended = []
    shard = Shard(from_numpy({"x": np.arange(10)}).tree, on_end=lambda *epoch: ended.append(epoch))
    batches = shard.iter_batches(5)
    loop = iter(batches)
    assert len(next(loop)["x"]) == 5
    shard.end_epoch(is_over=False)
    assert (shard.epoch, ended) == (0, []), "there are more rows"
    assert len(next(loop)["x"]) == 5
    shard.end_epoch(is_over=False)
    shard.end_epoch()
    assert (shard.epoch, ended) == (1, [(0, 0)])
    loop.close()
    assert shard.epoch == 1, "what is left of that loop counts no more"
    next(iter(batches))
    shard.end_epoch()
    assert (shard.epoch, ended) == (2, [(0, 0)]), "the second epoch was left early"


def test_loop_that_is_left_leaves_no_thread_and_is_a_new_epoch_next_time(files):
    shard = Shard(read_parquet(files).map(lambda row: row).tree)
    for _ in shard.iter_batches(10):
        break
    assert not [one for one in threading.enumerate() if one.name.startswith("paceline")]
    assert shard.epoch == 1
    assert sorted(ids_of(shard.iter_batches(64))) == list(range(400))
    assert shard.epoch == 2


def test_own_loader_of_torch(files):
    shard = Shard(read_parquet(files).select_columns("id").tree, 0, 2)
    loader = DataLoader(shard, batch_size=30)
    assert len(ids_of(loader)) == 200
    assert shard.epoch == 1
    with pytest.raises(DataError, match=r"Use shard.to_torch\(batch_size=..., num_workers=..."):
        list(DataLoader(shard, batch_size=30, num_workers=1))
    gc.collect()  # the loader's process ends with its iterator, which the traceback has kept


def test_loader_with_processes_that_persist_goes_on_in_the_middle(files):
    data = read_parquet(files).random_shuffle()
    first = Shard(data.tree)
    batches = iter(first.iter_batches(64, "torch"))
    had = ids_of(next(batches) for _ in range(3))
    shard = Shard(data.tree)
    shard.go_on([first.state()])
    loader = shard.to_torch(
        64, feature_columns=["id"], label_column=None, num_workers=2, persistent_workers=True, prefetch_factor=3
    )
    had += [int(number) for x in loader for number in x[:, 0]]
    assert sorted(had) == list(range(400))
    assert sorted(int(number) for x in loader for number in x[:, 0]) == list(range(400)), "the next epoch is whole"
    with pytest.raises(ArgumentError, match="a shard decides that itself"):
        shard.to_torch(64, num_workers=2, shuffle=True)


def test_length_of_a_loader(files):
    data = read_parquet(files)
    assert len(Shard(data.tree, 0, 2).to_torch(64)) == 4
    assert len(Shard(data.tree, 0, 2).to_torch(64, rest="drop")) == 3
    with pytest.raises(TypeError, match="not known before"):
        len(data.filter(len).iter_batches(64))


def test_mapped_array_travels_as_its_file(tmp_path):
    import pickle

    mapped = np.memmap(tmp_path / "rows", np.int64, "w+", shape=(100_000,))
    mapped[:] = np.arange(100_000)
    mapped.flush()
    packed = pickle.dumps(as_dataset(mapped))
    assert len(packed) < 5_000
    assert pickle.loads(packed).tree.source.take(np.array([7, 99_999])).columns["data"].tolist() == [7, 99_999]


def test_what_gives_other_rows_is_known_apart():
    """By its code and what it has closed over: a function that is made anew, as in every attempt, is the same one."""

    def filtered(modulus):
        return numbers(9).filter(lambda row: row["id"] % modulus)

    assert filtered(2).fingerprint() == filtered(2).fingerprint()
    assert filtered(2).fingerprint() != filtered(3).fingerprint()
    assert numbers(9).filter(pc.field("id") > 1).fingerprint() != numbers(9).filter(pc.field("id") > 2).fingerprint()
    one, other = numbers(9).map(lambda row: row), numbers(9).map(lambda row: {**row})
    assert one.fingerprint() == other.fingerprint(), "the same rows, in the same order"
    assert one.identity() != other.identity()


# --- the beginning of an epoch ----------------------------------------------------------------------------------------


@pytest.fixture
def rests(monkeypatch):
    """Row groups are read beyond their heads only when this is set."""
    may_read, read = threading.Event(), parquet.ParquetSource.read

    def reading(self, block, columns):
        if "its first" not in block.name:
            assert may_read.wait(60), f"{block.name} was not asked for in vain"
        return read(self, block, columns)

    monkeypatch.setattr(parquet.ParquetSource, "read", reading)
    yield may_read
    may_read.set()


@pytest.mark.parametrize("is_shuffled", [False, True])
def test_first_batch_needs_no_whole_row_group(is_shuffled, tmp_path, rests):
    ids = np.arange(40_000)
    pq.write_table(pa.table({"id": ids, "x": ids / 2}), tmp_path / "a.parquet", row_group_size=10_000)
    data = read_parquet(tmp_path / "a.parquet", lanes=4)
    loop = iter((data.random_shuffle(seed=3) if is_shuffled else data).iter_batches(64))
    first = next(loop)
    rests.set()
    every = [first, *loop]
    assert sorted(ids_of(every)) == ids.tolist()
    assert all((batch["x"] == batch["id"] / 2).all() for batch in every)


def test_order_of_files_stays_when_they_are_read_in_one_place(files):
    assert ids_of(read_parquet(files, lanes=1).iter_batches(7)) == list(range(400))


def test_rows_in_a_head_are_shuffled(files):
    orders = {
        tuple(ids_of([next(iter(read_parquet(files).random_shuffle(seed=s).iter_batches(16)))])) for s in range(5)
    }
    assert len(orders) == 5
