"""Data that is not there, damaged or not what was expected: said where, and what to do."""

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from torch.utils.data import IterableDataset

from paceline import Trainer
from paceline.data import as_dataset, from_numpy, mix, read_csv, read_json, read_parquet, resolve_dataset, sample_rng
from paceline.data.kinds import files
from paceline.data.shard import Shard
from paceline.errors import ArgumentError, ArgumentTypeError, DataError, TrainerStateError


def write(path, num_rows=30, **columns):
    pq.write_table(pa.table(columns or {"id": np.arange(num_rows), "x": np.ones(num_rows)}), path, row_group_size=10)
    return path


def read_all(dataset):
    return [batch for batch in dataset.iter_batches(8)]


@pytest.fixture
def numbers():
    return from_numpy({"id": np.arange(30)})


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nothing.parquet", r"nothing.parquet: this path is not there. It was looked for in /"),
        ("*.parquet", r"\*.parquet: this pattern matches no file"),
        (".", "no file in this folder whose name ends with .parquet"),
    ],
)
def test_nothing_is_there(path, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError, match=message):
        read_parquet(path)


@pytest.mark.parametrize("paths", [None, [], 3, [3]])
def test_not_a_path(paths):
    with pytest.raises(ArgumentTypeError, match="paths"):
        read_parquet(paths)


def test_unknown_storage_and_missing_object():
    with pytest.raises(ArgumentError, match="nowhere://"):
        read_parquet("nowhere://a/b.parquet")
    with pytest.raises(ArgumentError, match="there is no such file"):
        read_parquet("memory://a/b.parquet")


@pytest.mark.parametrize("damage", ["cut off", "not parquet", "empty"])
def test_damaged_footer_is_told_with_its_file(damage, tmp_path):
    write(tmp_path / "a.parquet")
    content = write(tmp_path / "b.parquet").read_bytes()
    damaged = {"cut off": content[: len(content) // 2], "not parquet": b"x" * 100, "empty": b""}[damage]
    (tmp_path / "b.parquet").write_bytes(damaged)
    with pytest.raises(DataError, match=r"b.parquet: its footer cannot be read.*damaged, cut off"):
        read_parquet(tmp_path)


def test_damaged_row_group_is_told_with_its_number(tmp_path):
    path = write(tmp_path / "a.parquet", 1000)
    content = bytearray(path.read_bytes())
    start = pq.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    content[start : start + 20] = b"\xff" * 20
    path.write_bytes(content)
    dataset = read_parquet(path)
    with pytest.raises(DataError, match=r"a.parquet: row group 1 cannot be read"):
        read_all(dataset)


def test_file_that_goes_away_is_told(tmp_path):
    path = write(tmp_path / "a.parquet")
    dataset = read_parquet(path)
    path.unlink()
    vars(dataset.tree.source)["_open"].__dict__.clear()
    with pytest.raises(DataError, match=r"a.parquet"):
        read_all(dataset)


def test_schemas_that_differ(tmp_path):
    write(tmp_path / "a.parquet")
    write(tmp_path / "b.parquet", id=np.arange(5), x=["one"] * 5)
    with pytest.raises(DataError, match=r"b.parquet differ.*'x' is string there and double in .*a.parquet"):
        read_parquet(tmp_path)
    (tmp_path / "a.csv").write_text("id,x\n1,2\n")
    (tmp_path / "b.csv").write_text("id,y\n1,2\n")
    with pytest.raises(DataError, match=r"first line of .*b.csv is b'id,y'"):
        read_csv(tmp_path)


def test_no_rows(tmp_path):
    write(tmp_path / "a.parquet", 0)
    with pytest.raises(DataError, match="there are no rows"):
        read_parquet(tmp_path)
    (tmp_path / "a.csv").write_text("id,x\n")
    with pytest.raises(DataError, match="there are no rows"):
        read_csv(tmp_path)
    with pytest.raises(DataError, match="there are no rows"):
        read_all(from_numpy({"id": np.empty(0)}))


def test_value_of_another_type_further_down_is_told_with_its_place(tmp_path):
    (tmp_path / "a.csv").write_text("id\n" + "1\n" * 50 + "one\n")
    with pytest.raises(DataError, match=r"a.csv: bytes \d+ to \d+ cannot be read.*one"):
        read_all(read_csv(tmp_path, block_bytes=20))
    (tmp_path / "a.jsonl").write_text('{"id": 1}\n' * 50 + '{"id": 1, "more": 2}\n')
    with pytest.raises(DataError, match=r"a.jsonl: bytes .* cannot be read.*unexpected field"):
        read_all(read_json(tmp_path, block_bytes=20))


class Storage(MemoryFileSystem):
    """Fails so many times when it is read."""

    protocol, num_failures = "shaky", 0
    store, pseudo_dirs = {}, [""]  # of this kind alone

    def _open(self, path, mode="rb", **options):
        if mode == "rb" and type(self).num_failures > 0:
            type(self).num_failures -= 1
            raise OSError("come back later")
        return super()._open(path, mode, **options)


@pytest.fixture
def storage(monkeypatch, tmp_path):
    monkeypatch.setattr(files, "_TRIES_S", (0.001, 0.001))
    fsspec.register_implementation("shaky", Storage, clobber=True)
    Storage.num_failures = 0
    with fsspec.open("shaky://data/a.parquet", "wb") as file:
        file.write(write(tmp_path / "a.parquet").read_bytes())
    return Storage


def test_storage_that_fails_for_a_while_is_asked_again(storage):
    storage.num_failures = 2
    dataset = read_parquet("shaky://data/*.parquet")
    assert sum(len(batch["id"]) for batch in read_all(dataset)) == 30


def test_storage_that_fails_for_good_is_told(storage):
    storage.num_failures = 100
    with pytest.raises(DataError, match=r"shaky://data/a.parquet: its footer cannot be read: OSError: come back later"):
        read_parquet("shaky://data/a.parquet")


# --- what is asked of rows --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size=0: expected at least 1"),
        ({"batch_size": 2, "global_batch_size": 4}, "give one of them"),
        ({"batch_format": "polars"}, "expected one of 'numpy', 'pandas', 'pyarrow', 'torch'"),
        ({"rest": "lose"}, "expected one of 'uneven', 'pad', 'drop'"),
        ({"epochs": -1}, "epochs=-1: expected a whole number"),
        ({"prefetch_batches": 1.5}, "prefetch_batches=1.5: expected a whole number"),
    ],
)
def test_batches_that_cannot_be(numbers, options, message):
    with pytest.raises(ArgumentError, match=message):
        numbers.iter_batches(**options)


def test_batch_smaller_than_the_number_of_ranks(numbers):
    with pytest.raises(ArgumentError, match="less than a row for each of 4 ranks"):
        Shard(numbers.tree, 0, 4).iter_batches(global_batch_size=3)
    with pytest.raises(ArgumentTypeError, match="expected a whole number"):
        numbers.iter_batches(batch_size=2.0)


def test_column_that_is_not_there(numbers, tmp_path):
    with pytest.raises(ArgumentError, match=r"no column 'idd'.*there are id"):
        numbers.select_columns(["idd"])
    with pytest.raises(DataError, match="no column 'y'; there are 'id'"):
        next(iter(numbers.to_torch(4, feature_columns=["id"], label_column="y")))
    files = read_parquet(write(tmp_path / "a.parquet"))
    with pytest.raises(DataError, match=r"a.parquet has no column 'y'; it has id, x"):
        next(iter(files.to_torch(4, feature_columns=["id"], label_column="y")))
    with pytest.raises(ArgumentError, match="there is no 'z'"):
        read_parquet(tmp_path / "a.parquet", columns=["z"])
    with pytest.raises(ArgumentError, match="the only column, 'id', is the label"):
        next(iter(numbers.to_torch(4)))


def test_function_that_raises_says_for_which_row(tmp_path):
    dataset = read_parquet(write(tmp_path / "a.parquet"), lanes=1).map(lambda row: 1 // (row["id"] - 13))
    with pytest.raises(ZeroDivisionError) as caught:
        read_all(dataset)
    assert "given to .map(), for row" in caught.value.__notes__[0]
    filtered = read_parquet(tmp_path / "a.parquet").filter(lambda row: 1 // (row["id"] - 13))
    with pytest.raises(ZeroDivisionError) as caught:
        read_all(filtered)
    assert "for row 3 of" in caught.value.__notes__[0]
    assert "a.parquet, row group 1" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda batch: {"id": batch["id"][:-1]}, "got 8 rows of .* and returned 7; expected as many"),
        (lambda batch: {"a": batch["id"], "b": batch["id"][1:]}, "columns of different lengths"),
        (lambda batch: 3, "returned a int; expected a dict of arrays"),
        (lambda batch: {"a": [object()] * len(batch["id"])}, "cannot be a column"),
    ],
)
def test_function_of_batches_that_returns_something_else(numbers, fn, message):
    with pytest.raises(DataError, match=message):
        read_all(numbers.map_batches(fn))


def test_rows_that_differ(numbers):
    with pytest.raises(DataError, match=r"made \['id'\] of the first row .* and \['x'\] of row 1"):
        read_all(numbers.map(lambda row: {"id": 1} if row["id"] == 0 else {"x": 1}))


def test_missing_numbers_and_lists_of_any_length_are_no_tensors():
    table = as_dataset(pa.table({"a": pa.array([1, None, 3]), "b": [[1], [2, 3], [4]]}))
    with pytest.raises(DataError, match="'a' has 1 missing values"):
        read_all(table.select_columns("a"))
    with pytest.raises(DataError, match="'b' holds lists of different lengths"):
        next(iter(table.select_columns("b").iter_torch_batches(3)))
    assert next(iter(table.iter_batches(3, "pandas")))["a"].isna().sum() == 1


@pytest.mark.parametrize("fn", [lambda row: None, lambda row: row if row["id"] else None, lambda row: row.update(x=1)])
def test_function_that_returns_nothing(numbers, fn):
    with pytest.raises(
        DataError, match=r"given to .map\(\) returned None for a row of arrays; .* Is a `return` missing"
    ):
        read_all(numbers.map(fn))


def test_field_that_comes_later_is_told_with_what_to_do(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n' * 20 + '{"a": 1, "b": 2}\n')
    with pytest.raises(DataError, match=r"unexpected field.* schema=\.\.\. says what they are"):
        read_all(read_json(tmp_path, block_bytes=50))


def test_labels_that_are_no_tensors(numbers):
    text = as_dataset(pa.table({"x": [1.0, 2.0], "y": ["a", "b"]}))
    with pytest.raises(ArgumentError, match=r"the label column 'y' holds object values, of which there are no tensors"):
        next(iter(text.to_torch(2)))
    with pytest.raises(ArgumentTypeError, match=r"label_column=\['a', 'b'\]\): expected the name of one column"):
        numbers.to_torch(2, label_column=["a", "b"])


def test_rows_of_a_stream_that_differ():
    class Stream(IterableDataset):
        def __init__(self, *rows):
            self.rows = rows

        def __iter__(self):
            return iter(self.rows)

    for other, told in (({"a": 1}, "a"), ({"a": 1, "b": 2, "c": 3}, "a, b, c"), ((1, 2), "a tuple")):
        with pytest.raises(DataError, match=f"a row with the columns a, b, and one with {told}: expected the same"):
            read_all(as_dataset(Stream({"a": 1, "b": 2}, other)))
    with pytest.raises(DataError, match=r"different shapes, \(1, 1\) and others, .* rows that are tuples"):
        read_all(as_dataset(Stream({"a": np.ones((1, 1))}, {"a": np.ones((2, 2))})))


def test_data_frame_with_two_columns_of_one_name():
    import pandas as pd

    with pytest.raises(ArgumentError, match="this data frame cannot be read: Duplicate column names"):
        as_dataset(pd.DataFrame([[1, 2]], columns=["a", "a"]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda data: data.filter(3), "expected a function or an Arrow expression, got a int"),
        (lambda data: data.map("len"), "expected a function"),
        (lambda data: data.repeat(0), "at least 1"),
        (lambda data: data.limit(True), "at least 1"),
        (lambda data: data.random_shuffle(window=0), "at least 1"),
        (lambda data: data.random_shuffle().limit(3).filter(len), "filter first"),
        (lambda data: data.map_batches(len, batch_size=0), "at least 1"),
        (lambda data: mix({}), "expects a dict with datasets"),
        (lambda data: mix({"a": 1}), "expected a paceline.data.Dataset"),
        (lambda data: mix({data: 0}), "is not a positive number"),
        (lambda data: mix({data: float("nan")}), "is not a positive number"),
    ],
)
def test_operations_that_cannot_be(numbers, make, message):
    with pytest.raises((ArgumentError, ArgumentTypeError), match=message):
        make(numbers)


def test_expression_needs_columns():
    from torch import ones
    from torch.utils.data import TensorDataset

    with pytest.raises(DataError, match=r"give .filter\(\) a function"):
        read_all(as_dataset(TensorDataset(ones(3))).filter(pc.field("x") > 1))


# --- what is given to a run -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (3, "dataset is a builtins.int; expected a torch dataset"),
        ({"train": "a.csv"}, r"dataset\['train'\] is a builtins.str"),
        ({}, "there is none in it"),
        ({1: np.ones(3)}, "its names must be text"),
        ([], "this list of folds is empty"),
        ([np.ones(3)], r"dataset\[0\] is a ndarray; in a list or tuple, expected pairs"),
    ],
)
def test_not_a_dataset(dataset, message):
    with pytest.raises((ArgumentError, ArgumentTypeError), match=message):
        resolve_dataset(dataset)


def test_fewer_rows_than_workers(tmp_path):
    with (
        Trainer(num_workers=2, logdir=tmp_path) as trainer,
        pytest.raises(DataError, match="has 1 rows, which are not enough for 2 workers"),
    ):
        trainer.run(lambda: None, dataset=np.ones(1))


def test_random_draws_belong_to_a_row():
    with pytest.raises(TrainerStateError, match="no row is being read here"):
        sample_rng()
