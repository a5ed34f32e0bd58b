"""Cross-validation with real workers: a loop of runs, all folds in one run, and a rank that is killed in a fold."""

import os
import signal
from collections import Counter

import numpy as np
import pytest

import paceline
from paceline import BackendConfig, LocalEngine, Trainer
from paceline.data import from_numpy, read_parquet, to_cv

NUM_ROWS, SPLITS = 34, 3


@pytest.fixture(scope="module", autouse=True)
def splitters():
    """Imported before a test is watched, since it sets environment variables; not above, where workers would too."""
    import sklearn.model_selection  # noqa: F401


@pytest.fixture(scope="module")
def warm(lasts):
    engine = LocalEngine(preload=["pandas", "pyarrow.parquet", "paceline.data.row_log"])
    with Trainer(backend=BackendConfig(), num_workers=2, engine=engine, logdir="folds") as trainer, lasts(trainer):
        yield trainer


def arrays(tmp_path):
    return from_numpy({"x": np.arange(NUM_ROWS)}).random_shuffle(seed=5)


def parquet(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"x": range(NUM_ROWS)}), tmp_path / "rows.parquet", row_group_size=8)
    return read_parquet(tmp_path / "rows.parquet").random_shuffle(seed=5)


def rows_of(dataset):
    return sorted(int(x) for batch in dataset.iter_batches(16) for x in batch["x"])


def train_one(config):
    rows = [x for batch in paceline.get_data_shard("train").iter_batches(5) for x in batch["x"].tolist()]
    paceline.save_checkpoint(total=sum(rows))
    return rows


def evaluate_one(config):
    return [x for batch in paceline.get_data_shard().iter_batches(5) for x in batch["x"].tolist()]


def test_loop_of_runs_on_one_group(warm, tmp_path):
    pids = set()
    for train_set, val_set in to_cv(arrays(tmp_path), SPLITS):
        trained = warm.run(train_one, {}, dataset={"train": train_set, "val": val_set})
        evaluated = warm.run(evaluate_one, {}, dataset=val_set, checkpoint=warm.latest_checkpoint_path)
        assert sorted(x for rank in (*trained, *evaluated) for x in rank) == list(range(NUM_ROWS))
        assert sorted(x for rank in evaluated for x in rank) == rows_of(val_set)
        pids.add(paceline.load_run(warm.latest_run_dir).status.worker_pids)
    assert len(pids) == 1, "the workers stayed"


def killed_once(config, index, step):
    """Rank 1 dies in the given fold, at the given batch, the first time that it is there."""
    is_due = [index, step] == config["kill"] and paceline.world_rank() == 1
    if is_due and not os.path.exists(config["killed"]):
        assert paceline.load_checkpoint().all_ranks, "what was saved last is committed"
        open(config["killed"], "w").close()
        os.kill(os.getpid(), signal.SIGKILL)


def train_a_fold(config, index, train_set, val_set, total):
    """Two epochs, saved after each batch; then the validation set. `total` is of the fold under way."""
    for step, batch in enumerate(train_set.get_split().iter_batches(4, epochs=2)):
        killed_once(config, index, step)
        total += int(batch["x"].sum())
        paceline.report(cv=index, rows=batch["x"].tolist(), total=total)
        paceline.save_checkpoint(cv=index, per_rank={"total": total})
    paceline.report(cv=index, val=[x for batch in val_set.get_split().iter_batches(4) for x in batch["x"].tolist()])


def train_by_items(config):
    checkpoint = paceline.load_checkpoint()
    for index, (train_set, val_set) in paceline.get_datasets().items():
        was_here = checkpoint is not None and checkpoint["cv"] == index and checkpoint.per_rank
        train_a_fold(config, index, train_set, val_set, checkpoint.per_rank["total"] if was_here else 0)


def train_by_enumerate(config):
    """As the seed's loop: it comes to the folds that were done, too, and reports and saves in them."""
    checkpoint = paceline.load_checkpoint()
    seen = []
    for index, (train_set, val_set) in enumerate(paceline.get_datasets()):
        was_here = checkpoint is not None and checkpoint["cv"] == index and checkpoint.per_rank
        train_a_fold(config, index, train_set, val_set, checkpoint.per_rank["total"] if was_here else 0)
        paceline.save_checkpoint(cv=index, per_rank={"total": -1})
        seen.append((index, paceline.load_checkpoint()["cv"]))
    return seen


def check_rows(run, pairs, num_epochs=2):
    """Each row of each training set has counted once in each epoch, and each validation row is there."""
    metrics = run.metrics
    for index, (train_set, val_set) in enumerate(pairs):
        reports = metrics[metrics["cv"] == index]
        trained = Counter(x for rows in reports["rows"].dropna() for x in rows)
        assert trained == dict.fromkeys(rows_of(train_set), num_epochs), f"fold {index}"
        assert sorted(x for rows in reports["val"].dropna() for x in rows) == rows_of(val_set)


@pytest.mark.parametrize(("data", "function"), [(arrays, train_by_items), (parquet, train_by_enumerate)])
def test_rank_is_killed_in_a_fold_and_every_row_of_every_fold_counts_once(warm, tmp_path, data, function):
    pairs = to_cv(data(tmp_path), SPLITS)
    config = {"kill": [2, 4], "killed": str(tmp_path / "killed")}
    seen = warm.run(function, config, dataset=pairs)
    if function is train_by_enumerate:
        assert seen == [[(0, 2), (1, 2), (2, 2)]] * 2, "what is saved in a fold that was done is dropped"
    run = paceline.load_run(warm.latest_run_dir)
    assert sum(event["kind"] == "restart" for event in run.events) == 1
    check_rows(run, pairs)
    totals = run.folds["total"][:SPLITS] * 2
    assert list(totals) == [2 * sum(rows_of(train)) for train, _ in pairs], "each fold went on with its own state"
    again = run.all_metrics[run.all_metrics["attempt"] == run.all_metrics["attempt"].max()]
    assert int(again["cv"].min()) == 2, "it went on in the fold that was under way"


def stop_in_a_fold(config):
    for index, (train_set, _) in paceline.get_datasets().items():
        for step, batch in enumerate(train_set.get_split().iter_batches(4, epochs=2)):
            paceline.report(cv=index, rows=batch["x"].tolist())
            paceline.save_checkpoint(cv=index)
            if [index, step] == [1, 3]:
                return


def go_on(config):
    paceline.load_checkpoint()
    folds = paceline.get_datasets()
    for index, (train_set, _) in folds.items():
        for batch in train_set.get_split().iter_batches(4, epochs=2):
            paceline.report(cv=index, rows=batch["x"].tolist())


def test_another_number_of_workers_goes_on_in_the_fold(warm, tmp_path):
    pairs = to_cv(arrays(tmp_path), SPLITS)
    warm.run(stop_in_a_fold, {}, dataset=pairs)
    runs = [paceline.load_run(warm.latest_run_dir)]
    with Trainer(backend=BackendConfig(), num_workers=3, logdir="folds_of_three") as three:
        three.run(go_on, {}, dataset=pairs, checkpoint=warm.latest_checkpoint_path)
        runs.append(paceline.load_run(three.latest_run_dir))
    counts = Counter((cv, x) for run in runs for cv, rows in run.metrics[["cv", "rows"]].values for x in rows)
    assert counts == {(index, x): 2 for index, (train_set, _) in enumerate(pairs) for x in rows_of(train_set)}


def look_before(config):
    """Whoever only looks at the folds, or takes one by its number, has not moved on."""
    paceline.load_checkpoint()
    folds = paceline.get_datasets()
    pairs = list(folds)
    paceline.save_checkpoint(cv=0)
    assert folds.state()["fold"] == 0
    with pytest.raises(paceline.errors.TrainerStateError, match=r"the run has folds; loop over get_datasets"):
        paceline.get_data_shard()
    return len(folds), len(pairs), len(list(folds[1][1].get_split().iter_batches(100)))


def ask_for_folds(config):
    with pytest.raises(paceline.errors.TrainerStateError, match=r"given no folds. Pass a list of pairs"):
        paceline.get_datasets()


def test_folds_in_this_process(tmp_path):
    with Trainer(backend=BackendConfig(), num_workers=0, logdir="folds_inline") as inline:
        assert inline.run(look_before, {}, dataset=to_cv(arrays(tmp_path), SPLITS)) == [(SPLITS, SPLITS, 1)]
        inline.run(ask_for_folds, {}, dataset=arrays(tmp_path))
