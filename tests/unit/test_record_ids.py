"""`record_ids`, in this process: what is asked, which ids a shard tells of, and that a row stays what it was."""

import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import paceline
from paceline import BackendConfig, Trainer
from paceline.arguments import request_of
from paceline.data import audit, diff, from_numpy, mix, read_parquet
from paceline.data.row_ids import all_ids
from paceline.data.row_log import named_by
from paceline.data.row_names import hashed
from paceline.data.shard import Shard
from paceline.errors import ArgumentError, ArgumentTypeError, DataError


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "rows.parquet"
    rows = np.arange(500)
    table = {"id": rows * 7, "key": [f"row-{row}" for row in rows], "x": rows * 0.5, "y": rows % 2}
    pq.write_table(pa.table(table), path, row_group_size=60)
    return path


def told(dataset, column, **options):
    """The ids that a shard tells, and the x of the same rows."""
    ids, xs = [], []
    shard = Shard(named_by(dataset.tree, column), on_rows=lambda epoch, some: ids.extend(np.asarray(some).tolist()))
    for batch in shard.iter_batches(64, **options):
        xs += batch["x"].tolist()
    return ids, xs


def changed(batch):
    return {"x": batch["x"], "z": batch["y"]}


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data,
        lambda data: data.random_shuffle(),
        lambda data: data.filter(lambda row: row["y"] == 1).random_shuffle(),
        lambda data: data.select_columns(["x"]),
        lambda data: data.map_batches(changed).filter(lambda row: row["z"] == 1, columns=["z"]),
        lambda data: data.limit(130).random_shuffle(window=100),
    ],
)
@pytest.mark.parametrize("kind", ["parquet", "numpy"])
def test_ids_are_those_of_the_column(files, kind, change):
    table = pq.read_table(files).to_pydict()
    source = read_parquet(files) if kind == "parquet" else from_numpy({name: np.array(v) for name, v in table.items()})
    data = change(source)
    ids, xs = told(data, "id")
    plain_ids, plain_xs = told(data, None)
    assert (xs, len(xs)) == (plain_xs, len(ids)), "the rows are the same, named or not"
    assert ids == [int(x * 2) * 7 for x in xs]
    assert plain_ids == [int(x * 2) for x in xs]
    assert told(data, "key")[0] == hashed(np.array([f"row-{int(x * 2)}" for x in xs], object)).tolist()
    assert sorted(all_ids(data, "id")) == sorted(ids)


def test_column_is_read_though_nobody_else_wants_it(files):
    seen = []
    shard = Shard(named_by(read_parquet(files, columns=["x", "y"]).tree, "id"), on_rows=lambda _, ids: seen.extend(ids))
    batches = list(shard.iter_batches(64))
    assert {*batches[0]} == {"x", "y"}
    assert sorted(seen) == [row * 7 for row in range(500)]
    torch = Shard(named_by(read_parquet(files).tree, "id"), on_rows=lambda _, ids: seen.extend(ids))
    x, _ = next(iter(torch.to_torch(10, feature_columns=["x"], label_column="y")))
    assert x.shape == (10, 1)
    assert len(seen) == 510


def test_rows_of_mixed_datasets_are_told_apart():
    data = mix({from_numpy({"x": np.arange(50.0)}): 1, from_numpy({"x": np.arange(30.0)}): 2})
    ids, _ = told(data, None)
    assert len({*ids}) == 80
    assert max(ids) == (1 << 56) + 29


@pytest.mark.parametrize(("column", "message"), [("nope", "nope"), ("x", "values of type float64")])
def test_column_that_names_no_rows(files, column, message):
    for data in (read_parquet(files), from_numpy({"x": np.arange(9.0)})):
        with pytest.raises(DataError, match=message):
            told(data, column)


def test_column_with_gaps(tmp_path):
    pq.write_table(pa.table({"id": pa.array([1, None, 3]), "x": [1.0, 2.0, 3.0]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="1 missing values"):
        told(read_parquet(tmp_path / "a.parquet"), "id")


def test_what_can_be_asked(files):
    def train():
        pass

    assert request_of(train, dataset=read_parquet(files), record_ids="id").record_ids == "id"
    with pytest.raises(ArgumentTypeError, match="record_ids is 3 of type int; expected True"):
        request_of(train, dataset=read_parquet(files), record_ids=3)
    with pytest.raises(ArgumentError, match='record_ids=""'):
        request_of(train, dataset=read_parquet(files), record_ids="")
    with pytest.raises(ArgumentError, match=r"this run has none: give it to run\(dataset=\.\.\.\)"):
        request_of(train, dataset=None, record_ids=True)


def read_all(config):
    train, valid = paceline.get_dataset("train"), paceline.get_data_shard("valid")
    shard = train.filter(lambda row: row["y"] == 1).get_split() if config.get("filter") else train.get_split()
    for _ in range(2):
        for number, _ in enumerate(shard.iter_batches(50)):
            if number % 2:
                paceline.report(loss=0.0)
        for _ in valid.iter_batches(100):
            pass
        paceline.save_checkpoint(x=1)


@pytest.mark.parametrize("record", [True, "id", "key"])
def test_whole_run_in_this_process(files, tmp_path, record):
    data = {"train": read_parquet(files).random_shuffle(), "valid": read_parquet(files).limit(70)}
    with Trainer(BackendConfig(), num_workers=0, logdir=tmp_path) as trainer:
        trainer.run(read_all, {}, dataset=data, record_ids=record)
        report = audit(trainer.latest_run_dir)
        trainer.run(read_all, {"filter": True}, dataset=data, record_ids=record)
    assert report.is_clean
    assert [(one.dataset, one.epoch, one.state, one.once) for one in report.epochs] == [
        ("train", 0, "finished", 500),
        ("train", 1, "finished", 500),
        ("valid", 0, "finished", 70),
        ("valid", 1, "finished", 70),
    ]
    assert [one.never for one in report.epochs][:2] == [0, 0]
    filtered = audit(trainer.latest_run_dir)
    first = filtered.epochs[0]
    assert (first.once, first.never, first.known_by) == (250, 0, "the rows of its other epochs")
    given = {"train": data["train"].filter(lambda row: row["y"] == 1), "valid": data["valid"]}
    known = audit(trainer.latest_run_dir, dataset=given)
    assert [(one.never, one.known_by) for one in known.epochs] == [(0, "the dataset that was given")] * 4
    assert diff(tmp_path / "run_001", tmp_path / "run_002").dataset == "train"
    with pytest.raises(ArgumentError, match=r"has read 'train', 'valid'; expected a dict"):
        audit(trainer.latest_run_dir, dataset=data["train"])


def read_in_two_forms(config):
    data = paceline.get_dataset()
    for shard in (data.get_split(), data.map(lambda row: {"z": row["x"]}).get_split()):
        for _ in shard.iter_batches(100):
            paceline.report(loss=0.0)


def test_rows_that_are_read_in_two_forms_did_not_come_twice(files, tmp_path):
    with Trainer(BackendConfig(), num_workers=0, logdir=tmp_path) as trainer:
        trainer.run(read_in_two_forms, dataset=read_parquet(files), record_ids=True)
    report = audit(trainer.latest_run_dir)
    assert report.is_clean
    assert [(one.dataset, one.once) for one in report.epochs] == [("dataset", 500), ("dataset (2)", 500)]


def test_reports_do_not_show_what_they_took_along(files, tmp_path):
    def train():
        for _ in paceline.get_data_shard().iter_batches(100):
            paceline.report(loss=1.0)

    with Trainer(BackendConfig(), num_workers=0, logdir=tmp_path) as trainer:
        steps = list(trainer.run_iterator(train, dataset=read_parquet(files), record_ids=True))
    assert len(steps) == 5
    assert {"loss", "_timestamp", "_time_this_iter_s", "_training_iteration"} == set(steps[0][0])
    assert paceline.load_run(trainer.latest_run_dir).request["record_ids"] is True


def test_what_cannot_be_reported_takes_no_rows_along(files, tmp_path):
    def train():
        for _ in paceline.get_data_shard().iter_batches(100):
            with pytest.raises(ArgumentTypeError):
                paceline.report(loss=threading.Lock())
            paceline.report(loss=1.0)

    with Trainer(BackendConfig(), num_workers=0, logdir=tmp_path) as trainer:
        trainer.run(train, dataset=read_parquet(files), record_ids=True)
    [epoch] = audit(trainer.latest_run_dir).epochs
    assert (epoch.once, epoch.steps, epoch.state) == (500, (1, 5), "finished"), "its end is told when the function ends"
