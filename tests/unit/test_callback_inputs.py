"""What callbacks have in common: which workers, which folder, flat numbers, missing packages, lazy names."""

import math
import os
import sys

import numpy as np
import pytest

import paceline.callbacks
from paceline.callbacks import MLflowLoggerCallback, TBXLoggerCallback, WandbLoggerCallback
from paceline.callbacks.flatten import as_number, flatten, numeric_metrics
from paceline.callbacks.log_dir import check_log_dir, make_log_dir
from paceline.callbacks.optional_package import environment_defaults
from paceline.callbacks.selection import WorkerSelection, single_worker
from paceline.callbacks.tracked_run import TrackedRun
from paceline.errors import ArgumentError, ArgumentTypeError, MissingDependencyError

RESULTS = [{"rank": 0}, {"rank": 1}, {"rank": 2}]


@pytest.mark.parametrize(
    ("workers", "ranks"), [(0, [0]), ([2, 0], [2, 0]), (range(2), [0, 1]), ([1, 1], [1]), (None, [0, 1, 2])]
)
def test_selection(workers, ranks):
    selection = WorkerSelection(workers)
    assert selection.pick(RESULTS) == [{"rank": rank} for rank in ranks]
    assert selection.pick_ranked(RESULTS) == [(rank, {"rank": rank}) for rank in ranks]


@pytest.mark.parametrize(
    ("workers", "error", "message"),
    [
        ("0", ArgumentTypeError, "got str"),
        (True, ArgumentTypeError, "got bool"),
        ([0, "1"], ArgumentTypeError, "got '1' in"),
        ([0, False], ArgumentTypeError, "got False in"),
        ([], ArgumentError, "empty list; use None"),
        (-1, ArgumentError, "from 0 on, got -1"),
    ],
)
def test_selection_refuses(workers, error, message):
    with pytest.raises(error, match=message):
        WorkerSelection(workers)


def test_selection_names_a_rank_that_does_not_exist():
    selection = WorkerSelection([0, 2], "workers_to_log")
    selection.check(3)
    selection.check(None)
    with pytest.raises(ArgumentError, match="workers_to_log asks for rank 2, but this run has 2 workers"):
        selection.check(2)


@pytest.mark.parametrize("num_workers", [8, math.inf])
def test_selection_takes_a_rank_that_may_exist_later(num_workers):
    WorkerSelection(7).check(num_workers)


def test_selection_skips_ranks_that_do_not_exist_in_a_step():
    selection = WorkerSelection([2, 0])
    assert selection.pick_ranked(RESULTS[:2]) == [(0, {"rank": 0})]
    assert selection.pick(RESULTS[:2]) == [{"rank": 0}]
    assert selection.pick(RESULTS) == [{"rank": 2}, {"rank": 0}]
    assert WorkerSelection(2).pick(RESULTS[:2]) == []


def test_tracked_runs_are_told_apart_and_survive_their_callback(tmp_path):
    run_dir = str(tmp_path / "run_001")
    first, second = single_worker(0), single_worker(1)
    TrackedRun(run_dir, "wandb", first, "p").keep("a")
    TrackedRun(run_dir, "wandb", second, "p").keep("b")
    TrackedRun(run_dir, "mlflow", first, None, "p").keep("c")
    TrackedRun(run_dir, "wandb", first, "p").keep("d")
    assert TrackedRun(run_dir, "wandb", first, "p").id() == "d"
    assert TrackedRun(run_dir, "wandb", second, "p").id() == "b"
    assert TrackedRun(run_dir, "mlflow", first, "p").id() == "c"
    assert TrackedRun(run_dir, "wandb", first, "another project").id() is None
    assert [path.name for path in (tmp_path / "run_001").iterdir()] == ["tracked_runs.json"]


def test_tracked_runs_file_is_damaged(tmp_path):
    (tmp_path / "tracked_runs.json").write_text('{"wandb')
    kept = TrackedRun(str(tmp_path), "wandb", single_worker(0))
    assert kept.id() is None
    kept.keep("a")
    assert kept.id() == "a"


def test_single_worker_takes_a_list_of_one():
    assert single_worker([1]).ranks == (1,)
    with pytest.raises(ArgumentError, match="one worker, got \\[0, 1\\]"):
        single_worker([0, 1])
    with pytest.raises(ArgumentTypeError, match="got None"):
        single_worker(None)


def test_flatten():
    nested = {"a": 1, "b": {"c": 2, "d": {"e": [3]}, "empty": {}}, 5: 6}
    assert flatten(nested) == {"a": 1, "b/c": 2, "b/d/e": [3], "5": 6}


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (1, 1),
        (0.5, 0.5),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (np.array(2.0), 2.0),
        (np.array([2.0]), None),
        (np.str_("x"), None),
        ("1", None),
        (None, None),
        (1j, None),
    ],
)
def test_as_number(value, number):
    assert as_number(value) == number


def test_numeric_metrics_leave_out_the_bookkeeping():
    result = {"loss": {"train": 1.5}, "name": "x", "_timestamp": 1, "_training_iteration": 3, "_pid": 4}
    assert numeric_metrics(result | {"_time_this_iter_s": 0.5}) == {
        "loss/train": 1.5,
        "_time_this_iter_s": 0.5,
    }


def test_log_dir_explicit_wins_and_parents_are_created(tmp_path):
    explicit = check_log_dir(str(tmp_path / "a" / "b"))
    assert make_log_dir(explicit, str(tmp_path / "run")) == tmp_path / "a" / "b"
    assert (tmp_path / "a" / "b").is_dir()
    assert not (tmp_path / "run").exists()
    assert make_log_dir(None, str(tmp_path / "run")) == tmp_path / "run"


@pytest.mark.parametrize("below", ["", "deeper"])
def test_log_dir_is_a_file(tmp_path, below):
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentError, match="a file is in the way"):
        make_log_dir(check_log_dir(tmp_path / "file" / below), str(tmp_path))


def test_log_dir_of_another_type():
    with pytest.raises(ArgumentTypeError, match="logdir must be a path, got int"):
        check_log_dir(3)


@pytest.mark.parametrize(
    ("callback", "package", "extra"),
    [
        (TBXLoggerCallback, "tensorboardX", "tensorboard"),
        (MLflowLoggerCallback, "mlflow", "mlflow"),
        (WandbLoggerCallback, "wandb", "wandb"),
    ],
)
def test_package_is_missing(monkeypatch, callback, package, extra):
    monkeypatch.setitem(sys.modules, package, None)  # how Python itself marks a module as not importable
    with pytest.raises(MissingDependencyError, match=f"pip install 'paceline\\[{extra}\\]'") as raised:
        callback()
    assert (raised.value.package, raised.value.extra) == (package, extra)


def test_environment_defaults_end_with_the_block_and_respect_the_user():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_TEST_SET", "mine")
        before = dict(os.environ)
        with environment_defaults(PACELINE_TEST_SET="other", PACELINE_TEST_UNSET="default"):
            assert os.environ["PACELINE_TEST_SET"] == "mine"
            assert os.environ["PACELINE_TEST_UNSET"] == "default"
        assert dict(os.environ) == before


def test_every_public_name_resolves():
    for name in paceline.callbacks.__all__:
        assert getattr(paceline.callbacks, name).__name__ in (name, name.removeprefix("SGD"))
    assert sorted(paceline.callbacks.__all__) == sorted(paceline.callbacks._MODULE_OF)
    with pytest.raises(AttributeError, match="has no attribute 'NoSuchCallback'"):
        _ = paceline.callbacks.NoSuchCallback
