"""What was found by attacking the data layer with rows, functions and positions that nobody expects."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from paceline.data import as_dataset, from_numpy, mix, read_parquet
from paceline.data.shard import Shard
from paceline.errors import DataError


def ids_of(batches):
    return [int(number) for batch in batches for number in batch["id"]]


def write(path, num_rows=30, **columns):
    pq.write_table(pa.table(columns or {"id": np.arange(num_rows), "x": np.ones(num_rows)}), path, row_group_size=10)
    return path


# --- rows that differ -------------------------------------------------------------------------------------------------


def test_lists_that_are_equally_long_in_each_place_but_not_in_all(tmp_path):
    lists = [[number] * (2 + number // 10) for number in range(30)]
    write(tmp_path / "a.parquet", id=range(30), l=lists)
    found = {
        row["id"]: row["l"] for table in read_parquet(tmp_path).iter_batches(7, "pyarrow") for row in table.to_pylist()
    }
    assert [found[number] for number in range(30)] == lists


def test_numbers_of_other_widths_are_joined():
    one = as_dataset(pa.table({"id": pa.array([1, None, 3], pa.int32())}))
    [table] = mix({one: 1, from_numpy({"id": np.array([2**40])}): 1}).iter_batches(4, "pyarrow")
    assert sorted(table["id"].to_pylist(), key=str) == [1, 2**40, 3, None]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: as_dataset(pa.table({"id": ["a", "b", "c"]})), "'id' holds int64 values in one place and string"),
        (lambda: from_numpy({"id": np.array(["a", "b", "c"])}), "'id' holds int64 values in one place and string"),
        (lambda: from_numpy({"id": np.arange(3)}).map(lambda row: 3), "columns id come together with rows .* a int"),
    ],
    ids=["text", "text of numpy", "no columns"],
)
def test_rows_that_cannot_be_put_together_are_told(other, message):
    for parts in ({from_numpy({"id": np.arange(3)}): 1, other(): 1}, {other(): 1, from_numpy({"id": np.arange(3)}): 1}):
        with pytest.raises(DataError, match=message.replace("int64", ".*").replace("string", ".*")):
            list(mix(parts).iter_batches(6))


@pytest.mark.parametrize("value", [2**70, "\ud800", {1: object()}], ids=["number", "half a letter", "object"])
def test_value_that_cannot_be_a_column_is_told(value):
    with pytest.raises(DataError, match="cannot be a column"):
        list(from_numpy({"id": np.arange(3)}).map(lambda row: {"a": value}).iter_batches(3))


def test_what_torch_does_not_know_is_a_list_or_a_number():
    columns = {"t": np.array(["a", "b"]), "d": np.array([1, 2], "timedelta64[s]")}
    [batch] = from_numpy(columns).iter_torch_batches(2)
    assert batch["t"] == ["a", "b"]
    assert batch["d"].tolist() == [10**9, 2 * 10**9]


# --- functions that do odd things -------------------------------------------------------------------------------------


def end(row):
    return next(iter(()))


@pytest.mark.parametrize("op", ["map", "filter", "map_batches"])
def test_function_that_raises_stop_iteration_does_not_end_the_data(op, tmp_path):
    for data in (from_numpy({"id": np.arange(30)}), read_parquet(write(tmp_path / "a.parquet"))):
        with pytest.raises(DataError, match=rf"given to \.{op}\(\) raised StopIteration, for"):
            list(getattr(data, op)(end).iter_batches(4))


class NoNotes(Exception):
    def add_note(self, note):
        raise RuntimeError("no")


def test_exception_that_takes_no_notes_comes_through():
    def fail(row):
        raise NoNotes("mine")

    with pytest.raises(NoNotes, match="mine"):
        list(from_numpy({"id": np.arange(3)}).map(fail).iter_batches(4))


def test_filter_that_is_neither_true_nor_false_says_for_which_row():
    with pytest.raises(ValueError, match="ambiguous") as caught:
        list(from_numpy({"id": np.arange(3)}).filter(lambda row: np.ones(2)).iter_batches(4))
    assert "given to .filter(), for row 0 of" in caught.value.__notes__[0]


# --- positions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_filtered", [False, True])
def test_position_beyond_the_data_is_told(is_filtered, tmp_path):
    """It left out the whole epoch."""
    data = read_parquet(write(tmp_path / "a.parquet"))
    shard = Shard((data.filter(lambda row: row["id"] % 2) if is_filtered else data).tree)
    shard.go_on([{"epoch": 0, "stop": 1000, "size": 5, "rank": 0, "world_size": 1, "begun": []}])
    with pytest.raises(DataError, match="position in the data is row 1000 of an epoch that has"):
        list(shard.iter_batches(5))


@pytest.mark.parametrize("state", [None, 3, "x", b"x", [1], np.int64(3)])
def test_position_that_is_no_document_is_told(state):
    with pytest.raises(DataError, match="cannot be read"):
        Shard(from_numpy({"id": np.arange(3)}).tree).go_on([state])


# --- processes of a loader --------------------------------------------------------------------------------------------


def test_what_a_loaders_process_cannot_send_is_told():
    """The batch was lost, and the loop waited for ever, or went on without it."""

    class Local(Exception):
        pass

    def fail(row):
        if row["id"] == 7:
            raise Local("here")
        return row

    data = from_numpy({"id": np.arange(30), "y": np.arange(30)})
    with pytest.raises(DataError, match=r"(?s)exception Local that cannot be pickled.*given to \.map\(\), for row"):
        list(data.map(fail).to_torch(4, num_workers=1))
    with pytest.raises(DataError, match="has made a batch that cannot be pickled"):
        list(data.to_torch(4, num_workers=1, collate_fn=lambda batch: lambda: batch))
