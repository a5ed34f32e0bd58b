"""Folds: who is in which, for every kind of data; and which of them is under way."""

import logging
import pickle
import sys

import numpy as np
import pytest
from sklearn.model_selection import KFold, StratifiedKFold

import paceline
from paceline import BackendConfig, Trainer
from paceline.data import as_dataset, audit, from_numpy, mix, read_csv, read_json, read_parquet, resolve_dataset, to_cv
from paceline.data.folds_in_worker import FoldsInWorker, Progress
from paceline.data.shard import Shard
from paceline.errors import ArgumentError, ArgumentTypeError, DataError, MissingDependencyError

NUM_ROWS = 203
NUM_GROUPS = 17


def columns(num_rows=NUM_ROWS):
    """Row x is in group x % 17, and one in four is of class "b"; the last column is text."""
    x = np.arange(num_rows)
    return {"x": x, "group": x % NUM_GROUPS, "label": np.where(x % 4, "a", "b")}


def numpy_data(tmp_path, num_rows=NUM_ROWS):
    return from_numpy(columns(num_rows))


def pandas_data(tmp_path, num_rows=NUM_ROWS):
    import pandas as pd

    return pd.DataFrame(columns(num_rows))


def arrow_data(tmp_path, num_rows=NUM_ROWS):
    import pyarrow as pa

    return pa.table(columns(num_rows))


def torch_data(tmp_path, num_rows=NUM_ROWS):
    from torch.utils.data import Dataset

    class Rows(Dataset):
        def __len__(self):
            return num_rows

        def __getitem__(self, x):
            return {"x": x, "group": x % NUM_GROUPS, "label": "a" if x % 4 else "b"}

    return Rows()


def parquet_data(tmp_path, num_rows=NUM_ROWS):
    import pyarrow.parquet as pq

    table, half = arrow_data(tmp_path, num_rows), num_rows // 2
    pq.write_table(table.slice(0, half), tmp_path / "0.parquet", row_group_size=16)
    pq.write_table(table.slice(half), tmp_path / "1.parquet", row_group_size=16)
    return read_parquet(tmp_path)


def csv_data(tmp_path, num_rows=NUM_ROWS):
    pandas_data(tmp_path, num_rows).to_csv(tmp_path / "rows.csv", index=False)
    return read_csv(tmp_path / "rows.csv", block_bytes=300)


def json_data(tmp_path, num_rows=NUM_ROWS):
    pandas_data(tmp_path, num_rows).to_json(tmp_path / "rows.jsonl", orient="records", lines=True)
    return read_json(tmp_path / "rows.jsonl", block_bytes=1000)


def stream_data(tmp_path, num_rows=NUM_ROWS):
    from torch.utils.data import IterableDataset

    rows = torch_data(tmp_path, num_rows)

    class Stream(IterableDataset):
        def __iter__(self):
            return (rows[x] for x in range(len(rows)))

    return as_dataset(Stream())


def filtered_data(tmp_path, num_rows=NUM_ROWS):
    return numpy_data(tmp_path, num_rows * 2).filter(lambda row: row["x"] < num_rows)


INDEXED = [numpy_data, pandas_data, arrow_data, torch_data]
FILES = [parquet_data, csv_data, json_data]
KINDS = [*INDEXED, *FILES, filtered_data, stream_data]
KINDS_WITH_ALL_CLASSES = [*INDEXED, *FILES, filtered_data]


def numbers(dataset, rank=0, world_size=1, num_epochs=1):
    """Of the rows that a rank has in the last of so many epochs."""
    shard = Shard(dataset.tree, rank, world_size)
    for _ in range(num_epochs):
        batches = list(shard.iter_batches(16))
    return [int(x) for batch in batches for x in batch["x"]]


def check_partition(pairs, rows=range(NUM_ROWS)):
    """Gives the validation sets."""
    vals = []
    for train, val in pairs:
        mine, others = numbers(val), numbers(train)
        assert sorted([*mine, *others]) == sorted(rows), "train is the rest, and no row comes twice"
        assert mine, "no fold is empty"
        vals.append(mine)
    assert sorted(x for val in vals for x in val) == sorted(rows), "each row is in one validation set"
    return vals


def named(kind):
    return kind.__name__.removesuffix("_data")


def pytest_generate_tests(metafunc):
    for name, kinds in (("kind", KINDS), ("known", KINDS_WITH_ALL_CLASSES), ("file", FILES), ("indexed", INDEXED)):
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, kinds, ids=named)


@pytest.mark.parametrize("splits", [2, 5])
def test_each_row_is_for_validation_once(kind, splits, tmp_path):
    vals = check_partition(to_cv(kind(tmp_path), splits))
    assert len(vals) == splits
    sizes = [len(val) for val in vals]
    assert max(sizes) - min(sizes) <= (14 if kind in (csv_data, json_data) else 3), "about equally large"


def test_groups_stay_together(kind, tmp_path):
    vals = check_partition(to_cv(kind(tmp_path), 3, groups="group"))
    groups = [{x % NUM_GROUPS for x in val} for val in vals]
    assert sum(map(len, groups)) == NUM_GROUPS


def test_each_fold_has_its_share_of_each_class(known, tmp_path):
    vals = check_partition(to_cv(known(tmp_path), 5, stratify="label"))
    assert {sum(x % 4 == 0 for x in val) for val in vals} <= {10, 11}


def test_stratified_and_in_groups(known, tmp_path):
    vals = check_partition(to_cv(known(tmp_path), 3, stratify="label", groups="group"))
    assert sum(len({x % NUM_GROUPS for x in val}) for val in vals) == NUM_GROUPS
    assert all(10 <= sum(x % 4 == 0 for x in val) <= 25 for val in vals)


def test_membership_depends_on_neither_epoch_nor_ranks_nor_lanes_nor_shuffling(kind, tmp_path):
    given = as_dataset(kind(tmp_path))
    expected = [(sorted(numbers(train)), sorted(numbers(val))) for train, val in to_cv(given, 4)]
    views = [given] if kind is stream_data else [given, given.random_shuffle(window=40, seed=3)]
    for view in views:
        for (train, val), (others, mine) in zip(to_cv(view, 4), expected, strict=True):
            for epoch in (1, 2):
                assert sorted(numbers(val, num_epochs=epoch)) == mine
            assert sorted(x for rank in range(3) for x in numbers(train, rank, 3)) == others


def test_lanes_do_not_change_folds(tmp_path):
    parquet_data(tmp_path)
    one, many = (to_cv(read_parquet(tmp_path, lanes=lanes), 3) for lanes in (1, 8))
    assert [sorted(numbers(val)) for _, val in one] == [sorted(numbers(val)) for _, val in many]


def test_folds_with_an_index_are_those_of_scikit_learn(indexed, tmp_path):
    data = indexed(tmp_path)
    for options in ({}, {"shuffle": True, "seed": 7}):
        state = options.get("seed")
        theirs = KFold(4, shuffle="shuffle" in options, random_state=state).split(np.arange(NUM_ROWS))
        assert [numbers(val) for _, val in to_cv(data, 4, **options)] == [val.tolist() for _, val in theirs]
    theirs = StratifiedKFold(4).split(np.arange(NUM_ROWS), columns()["label"])
    assert [numbers(val) for _, val in to_cv(data, 4, stratify="label")] == [val.tolist() for _, val in theirs]


def test_seed_draws_other_folds(file, tmp_path):
    data = file(tmp_path)
    first, again, other = ([sorted(numbers(val)) for _, val in to_cv(data, 4, seed=seed)] for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_rows_keep_the_numbers_that_they_have_in_the_whole(kind, tmp_path):
    def ids(dataset):
        found = {}
        shard = Shard(dataset.tree, on_rows=lambda epoch, ids: found.setdefault("ids", []).extend(ids.tolist()))
        rows = [int(x) for batch in shard.iter_batches(16) for x in batch["x"]]
        return dict(zip(rows, found["ids"], strict=True))

    data = as_dataset(kind(tmp_path))
    whole = ids(data)
    for train, val in to_cv(data, 2):
        assert {**ids(train), **ids(val)} == whole
    [(inner, _), _] = to_cv(to_cv(data, 2)[0][0], 2)
    assert ids(inner).items() <= whole.items(), "of a fold of a fold, too"


def test_folds_of_a_fold(kind, tmp_path):
    for train, _ in to_cv(kind(tmp_path), 3):
        check_partition(to_cv(train, 3), numbers(train))


def test_folds_of_a_fold_by_column(known, tmp_path):
    train, _ = to_cv(known(tmp_path), 3, groups="group")[1]
    vals = check_partition(to_cv(train, 2, groups="group", stratify="label"), numbers(train))
    groups = [{x % NUM_GROUPS for x in val} for val in vals]
    assert groups[0].isdisjoint(groups[1])


def test_limit_comes_before_the_folds(known, tmp_path):
    limited = as_dataset(known(tmp_path)).limit(50)
    rows = numbers(limited)
    check_partition(to_cv(limited, 4), rows)
    check_partition(to_cv(limited, 3, groups="group"), rows)


def test_other_operations_stay(known, tmp_path):
    data = as_dataset(known(tmp_path)).map(lambda row: {"x": row["x"], "third": row["x"] % 3})
    vals = check_partition(to_cv(data.random_shuffle(), 3, groups="third"))
    assert sorted([*{x % 3 for x in val}] for val in vals) == [[0], [1], [2]]


def test_mixed_data_has_its_groups_in_one_fold(tmp_path):
    """The same groups in two datasets; and a fold that is mixed with others keeps its rows."""
    other = from_numpy({name: values[:100] for name, values in columns().items()})
    for first in (parquet_data(tmp_path), stream_data(tmp_path)):
        for train, val in to_cv(mix({first: 0.5, other: 0.5}), 3, groups="group"):
            assert {x % NUM_GROUPS for x in numbers(train)}.isdisjoint({x % NUM_GROUPS for x in numbers(val)})
        train, val = to_cv(first, 3)[0]
        mixed = mix(
            {from_numpy({"x": np.array([1000]), "group": np.array([0]), "label": np.array(["a"])}): 1, train: 1}
        )
        assert {*numbers(mixed)} == {*numbers(train), 1000}


def test_repeated_rows_are_in_one_fold(tmp_path):
    for train, val in to_cv(parquet_data(tmp_path).repeat(2), 3):
        mine = numbers(val)
        assert sorted(mine) == sorted([*{*mine}, *{*mine}])
        assert {*mine}.isdisjoint(numbers(train))


def test_folds_are_views_and_travel(known, tmp_path):
    pairs = to_cv(known(tmp_path) if known not in (torch_data, filtered_data) else numpy_data(tmp_path), 5)
    size = len(pickle.dumps(pairs)) - len(pickle.dumps(pairs[0]))
    assert size < 8000, "all of them share the data"
    copies = pickle.loads(pickle.dumps(pairs))
    assert [numbers(val) for _, val in copies] == [numbers(val) for _, val in pairs]


def test_folds_differ_in_their_fingerprints(kind, tmp_path):
    data = kind(tmp_path)
    marks = [one.fingerprint() for pair in to_cv(data, 3) for one in pair]
    assert len({*marks}) == 6
    assert marks == [one.fingerprint() for pair in to_cv(data, 3) for one in pair]


def test_known_size_and_description(tmp_path):
    train, val = to_cv(numpy_data(tmp_path), 4)[1]
    assert (train.num_rows(), val.num_rows()) == (152, 51)
    assert "fold 1 of arrays, for validation" in repr(val)
    told = resolve_dataset(to_cv(numpy_data(tmp_path), 4)).describe()
    assert told["folds"][1][1]["source"]["num_rows"] == 51


@pytest.mark.parametrize("options", [{}, {"seed": 3}, {"groups": "group"}, {"stratify": "label"}])
@pytest.mark.parametrize("splits", [2, 7])
def test_size_of_a_fold_of_parquet_files_is_known(splits, options, tmp_path):
    for pair in to_cv(parquet_data(tmp_path), splits, **options):
        for one in pair:
            assert one.num_rows() == len(numbers(one))
            assert len(one.to_torch(10)) == -(-one.num_rows() // 10)


def test_size_that_would_have_to_be_read_is_not_known(tmp_path):
    parquet, csv = parquet_data(tmp_path), csv_data(tmp_path)
    inner = to_cv(to_cv(parquet, 2)[0][0], 2)[0][0]
    for data in (inner, to_cv(csv, 2)[0][0], to_cv(parquet.filter(lambda row: row["x"] > 3), 2)[0][0]):
        assert data.num_rows() is None
    assert (parquet.limit(20).num_rows(), parquet.limit(1000).num_rows(), csv.limit(20).num_rows()) == (20, 203, None)


def read_folds(config):
    for index, pair in paceline.get_datasets().items():
        for one in pair:
            for batch in one.get_split().iter_batches(16):
                paceline.report(cv=index, n=len(batch["x"]))


@pytest.mark.parametrize("is_given", [False, True])
@pytest.mark.parametrize("options", [{}, {"groups": "group"}])
def test_folds_are_audited_by_the_numbers_that_rows_have_in_the_whole(kind, options, is_given, tmp_path):
    folds = to_cv(kind(tmp_path), 3, **options)
    with Trainer(BackendConfig(), num_workers=0, logdir=tmp_path / "runs") as trainer:
        trainer.run(read_folds, dataset=folds, record_ids=True)
    report = audit(trainer.latest_run_dir, dataset=folds if is_given else None)
    assert report.is_clean, str(report)
    assert sum(one.once for one in report.epochs) == 3 * NUM_ROWS
    if is_given:
        assert {one.never for one in report.epochs} == {0}


# --- what cannot be ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("splits", [1, 0, 2.0, True, "5"])
def test_too_few_splits(splits, tmp_path):
    with pytest.raises(ArgumentError, match=rf"splits={splits!r}: expected a whole number, at least 2"):
        to_cv(numpy_data(tmp_path), splits)


def test_more_splits_than_rows(tmp_path):
    for data in (numpy_data(tmp_path, 3), parquet_data(tmp_path, 3)):
        with pytest.raises(ArgumentError, match=r"splits=4: .* has 3 rows; expected at most so many"):
            to_cv(data, 4)


@pytest.mark.parametrize("options", [{"stratify": "nolabel"}, {"groups": "nolabel"}])
def test_column_that_is_not_there(known, options, tmp_path):
    [name] = options
    with pytest.raises(ArgumentError, match=rf"{name}='nolabel': (there is no such column in|a row of .* has no col)"):
        to_cv(known(tmp_path), 3, **options)


def test_column_that_was_left_out_or_never_made(tmp_path):
    data = parquet_data(tmp_path)
    with pytest.raises(ArgumentError, match=r"no such column in .*; there are 'x', 'label'"):
        to_cv(data.select_columns(["x", "label"]), 3, groups="group")
    with pytest.raises(ArgumentError, match=r"no such column in .*; there are 'x'"):
        to_cv(data.map(lambda row: {"x": row["x"]}), 3, groups="group")
    with pytest.raises(DataError, match=r"no column 'nogroup'"):
        numbers(to_cv(stream_data(tmp_path), 3, groups="nogroup")[0][0])


def test_columns_that_say_nothing(tmp_path):
    data = parquet_data(tmp_path)
    with pytest.raises(ArgumentError, match=r"stratify='x': no value of this column has splits=3 rows"):
        to_cv(data, 3, stratify="x")
    with pytest.raises(ArgumentError, match=r"groups='label' has 2 different values in .*at least splits=3"):
        to_cv(data, 3, groups="label")
    with pytest.raises(ArgumentError, match=r"stratify='y': a value .* is an array of the shape \(2,\)"):
        to_cv(from_numpy({"y": np.zeros((9, 2))}), 3, stratify="y")
    with pytest.raises(ArgumentTypeError, match=r"stratify= is a ndarray; expected the name of a column"):
        to_cv(data, 3, stratify=np.zeros(3))


def test_missing_values_are_a_group(tmp_path):
    import pyarrow as pa

    table = pa.table({"x": range(20), "g": ["a", None, "c", "d"] * 5})
    vals = check_partition(to_cv(table, 4, groups="g"), range(20))
    assert sorted(val[0] % 4 for val in vals) == [0, 1, 2, 3]


def test_other_arguments(tmp_path):
    data = numpy_data(tmp_path)
    with pytest.raises(ArgumentError, match=r"seed=-1: expected a whole number from 0"):
        to_cv(data, seed=-1)
    with pytest.raises(ArgumentTypeError, match=r"shuffle=1 is a int; expected True or False"):
        to_cv(data, shuffle=1)
    with pytest.raises(ArgumentTypeError, match=r"dataset is a builtins.int; expected"):
        to_cv(5)
    with pytest.raises(ArgumentError, match=r"cannot come after .limit\(\)"):
        to_cv(data.random_shuffle().limit(10))
    with pytest.raises(ArgumentError, match=r"stratify='label': .*from its first row on"):
        to_cv(stream_data(tmp_path), stratify="label")


def test_scikit_learn_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(MissingDependencyError, match=r"'scikit-learn'.*paceline\[data\]"):
        to_cv(numpy_data(tmp_path))
    check_partition(to_cv(parquet_data(tmp_path), 3))


# --- in a worker ------------------------------------------------------------------------------------------------------


def test_fold_under_way_is_that_of_the_loop():
    progress = Progress(3)
    assert progress.under_way == 0
    for fold in range(3):
        progress.enter(fold)
        assert progress.under_way == fold
        progress.read(fold)
        progress.read(0)  # to compare, say
        assert progress.under_way == fold
    progress.leave()
    assert progress.under_way == 3, "all are done"


def test_looking_at_all_folds_is_no_progress():
    progress = Progress(3)
    for fold in range(3):
        progress.enter(fold)
    progress.leave()
    assert progress.under_way == 0
    assert progress.read(1)
    assert progress.under_way == 1, "without a loop, the one that is read"


def test_folds_that_were_done_are_passed_through():
    progress = Progress(3)
    progress.done = 2
    seen = []
    for fold in range(3):
        progress.enter(fold)
        seen.append((progress.read(fold), progress.is_repeating, progress.under_way))
    assert seen == [(False, True, 2), (False, True, 2), (True, False, 2)]
    progress.leave()
    assert not progress.is_repeating


def folds_of(num_folds=3):
    pairs = to_cv(from_numpy(columns(30)), num_folds)
    shards = {}

    def make(dataset, name, rank):
        return shards.setdefault(name, Shard(dataset.tree))

    return FoldsInWorker(pairs, make)


def test_folds_are_a_sequence():
    folds = folds_of()
    assert len(folds) == 3
    assert folds[-1] is folds[2]
    assert [*folds] == folds[:]
    assert [index for index, _ in folds.items()] == [0, 1, 2]
    with pytest.raises(IndexError):
        _ = folds[3]


def test_ranks_that_were_in_different_folds_go_on_with_the_first():
    folds = folds_of()
    folds.restore(None, lambda: [{"fold": 2, "num_folds": 3}, None, {"fold": 1, "num_folds": 3}])
    assert [index for index, _ in folds.items()] == [1, 2]
    lengths = [len(list(train.get_split().iter_batches(5, epochs=3))) for train, _ in folds]
    assert lengths == [0, 12, 12], "nothing of a fold that was done, however many epochs are asked for"
    assert folds.state() == {"fold": 3, "num_folds": 3}


def test_checkpoint_of_another_number_of_folds(caplog):
    folds = folds_of()
    with caplog.at_level(logging.WARNING):
        folds.restore(None, lambda: [{"fold": 4, "num_folds": 5}])
    assert [index for index, _ in folds.items()] == [0, 1, 2]
    assert "a run with 5 folds, and this one has 3" in caplog.text


def test_folds_of_rows_with_an_index_are_clean(tmp_path):
    """They have the numbers of the data that they are cut from: those of the other folds are not missing."""

    def train():
        for _, pair in paceline.get_datasets().items():
            for part in pair:
                for _ in part.get_split().iter_batches(7):
                    paceline.report(x=1)

    data = from_numpy({"x": np.arange(60), "y": np.arange(60) % 2})
    with Trainer(BackendConfig(), num_workers=0, logdir=tmp_path) as trainer:
        trainer.run(train, dataset=to_cv(data, 3, stratify="y"), record_ids=True)
    report = audit(trainer.latest_run_dir)
    assert [(one.once, one.twice, one.never) for one in report.epochs] == [(40, 0, 0), (20, 0, 0)] * 3
    assert report.is_clean
