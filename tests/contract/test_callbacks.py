"""One suite for every callback that Paceline has, with real files and with trackers offline: what `SGDCallback` and the
page about callbacks promise holds for each."""

import csv
import inspect
import io
import json
import math
import os
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from wandb_file import read_wandb_file

import paceline.callbacks
from paceline.callbacks import SGDCallback
from paceline.checkpoints import CheckpointInfo
from paceline.errors import ArgumentError

HOOKS = [name for name in vars(SGDCallback) if not name.startswith("_")]
CALLBACKS = {
    name: value
    for name, value in ((name, getattr(paceline.callbacks, name)) for name in paceline.callbacks.__all__)
    if isinstance(value, type) and issubclass(value, SGDCallback) and value is not SGDCallback
}


@dataclass
class Kit:
    """How the suite makes a callback, and reads what it has left in a run folder: (step, loss) by step. A new callback
    adds its own to `KITS`; one that shows things instead of keeping them has nothing to read."""

    make: Callable[[], SGDCallback]
    losses: Callable[[Path], list[tuple[int, float]]] | None = None


# --- how each log is read -------------------------------------------------------------------------------------------


def json_losses(run_dir):
    logged = json.loads((run_dir / "results.json").read_text())
    return [(one["_training_iteration"], one["loss"]) for [one] in logged if "loss" in one]


def csv_losses(run_dir):
    with (run_dir / "results.csv").open(newline="") as file:
        return [(int(row["_training_iteration"]), float(row["loss"])) for row in csv.DictReader(file) if row["loss"]]


def tensorboard_losses(run_dir):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return [(event.step, event.value) for event in EventAccumulator(str(run_dir)).Reload().Scalars("loss")]


def mlflow_losses(run_dir):
    from mlflow.tracking import MlflowClient

    client = MlflowClient(str(run_dir / "mlruns"))
    [run] = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    assert run.info.status in ("FINISHED", "FAILED", "KILLED")
    return [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, "loss")]


def wandb_losses(run_dir):
    records = [record for path in run_dir.glob("wandb/offline-run-*/run-*.wandb") for record in whole_wandb_file(path)]
    assert len({record.run.run_id for record in records if record.HasField("run")}) == 1, "all parts are of one run"
    rows = [
        {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    rows.sort(key=lambda row: float(row["_timestamp"]))
    return [(int(row["training_iteration"]), float(row["loss"])) for row in rows if "loss" in row]


def whole_wandb_file(path):
    """With the record of the run's end: wandb's service writes it a moment after `finish` has returned."""
    deadline = time.monotonic() + 30
    records = read_wandb_file(path)
    while not any(record.HasField("exit") for record in records):
        assert time.monotonic() < deadline, f"{path} has no end"
        threading.Event().wait(0.01)
        records = read_wandb_file(path)
    return records


def progress():
    console = Console(file=io.StringIO(), force_terminal=True, width=100, _environ={"TERM": "xterm"})
    return paceline.callbacks.ProgressCallback(console)


def wandb_offline():
    import wandb

    quiet = wandb.Settings(console="off", silent=True, x_disable_stats=True, x_disable_meta=True)
    return paceline.callbacks.WandbLoggerCallback(project="contract", mode="offline", settings=quiet)


KITS = {
    "CSVLoggerCallback": Kit(paceline.callbacks.CSVLoggerCallback, csv_losses),
    "JsonLoggerCallback": Kit(paceline.callbacks.JsonLoggerCallback, json_losses),
    "MLflowLoggerCallback": Kit(paceline.callbacks.MLflowLoggerCallback, mlflow_losses),
    "PrintCallback": Kit(paceline.callbacks.PrintCallback),
    "ProgressCallback": Kit(progress),
    "TBXLoggerCallback": Kit(paceline.callbacks.TBXLoggerCallback, tensorboard_losses),
    "WandbLoggerCallback": Kit(wandb_offline, wandb_losses),
}
LOGGERS = [name for name, kit in KITS.items() if kit.losses]


@pytest.fixture(scope="module", autouse=True)
def trackers(tmp_path_factory):
    """MLflow and wandb in this process, for as long as this module runs: they have a service process and variables,
    which are no leak of a test. Nothing leaves the machine (`tests/procs/test_trackers.py` watches that)."""
    scratch = tmp_path_factory.mktemp("trackers")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("MLFLOW_ALLOW_FILE_STORE", "MLFLOW_DISABLE_TELEMETRY", "WANDB_SILENT"):
            patch.setenv(name, "true")
        patch.setenv("WANDB_ERROR_REPORTING", "false")
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
            patch.setenv(name, str(scratch))
        before = dict(os.environ)
        import mlflow.tracking  # noqa: F401
        import wandb

        callback = wandb_offline()
        callback.start_training(str(scratch / "run"), {})  # whatever is started with the first run
        callback.finish_training()
        yield
        wandb.teardown()
        for name in set(os.environ) - set(before):
            del os.environ[name]


@pytest.fixture(params=sorted(CALLBACKS))
def kit(request):
    assert request.param in KITS, f"{request.param} is not under contract: add how to make it to KITS in {__file__}"
    return KITS[request.param]


for_loggers = pytest.mark.parametrize("kit", LOGGERS, indirect=True)


@pytest.fixture
def run_dir(tmp_path):
    return tmp_path / "sgd" / "run_001"


def start(callback, run_dir, **info):
    told = {"run_id": run_dir.name, "num_workers": 3, "world_size": 2, "is_resumed": False, **info}
    callback.start_training(str(run_dir), {"lr": 0.1, "model": {"layers": [1, 2]}}, **told)
    return callback


def step(number, num_ranks=2, **metrics):
    """What every rank has reported; the loss is the number of the step, if no other is given."""
    stamps = {"_training_iteration": number, "_timestamp": 1, "_time_this_iter_s": 0.1, "_time_total_s": 1.0, "_pid": 1}
    return [{"loss": float(number), **metrics, **stamps} for _ in range(num_ranks)]


def finish(callback, status="SUCCEEDED"):
    is_error = status == "FAILED"
    callback.finish_training(error=is_error, status=status, exception=ValueError("x") if is_error else None)


def assert_logged(kit, run_dir, *numbers):
    if kit.losses:
        assert kit.losses(run_dir) == [(number, float(number)) for number in numbers]


CHECKPOINT = CheckpointInfo(id=1, path="/c/checkpoint_000001", score=None, iteration=2, time=0.0, num_bytes=1)


def test_every_callback_is_under_contract():
    assert set(KITS) == set(CALLBACKS), "each callback of paceline.callbacks has a kit here"


def test_hooks_take_what_a_later_version_tells(kit):
    callback = kit.make()
    for hook in HOOKS:
        parameters = inspect.signature(getattr(callback, hook)).parameters.values()
        assert any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters), hook


def test_life_of_a_run_with_information_that_nobody_knows_yet(kit, run_dir):
    """And with a step that is made again after the restart: the log has the later one, and may keep the former."""
    callback, new = kit.make(), {"told_by_a_later_version": object()}
    start(callback, run_dir, **new)
    for number in (1, 2, 3):
        callback.handle_result(step(number), **new)
    callback.handle_checkpoint(CHECKPOINT, **new)
    callback.handle_restart(1, "rank 1 was killed", cause="loss", **new)
    callback.handle_result(step(3), **new)
    callback.handle_restart(2, "there is room", cause="growth", **new)
    callback.handle_resize(3, former=2, reason="there is room", **new)
    callback.handle_result(step(4, num_ranks=3), **new)
    callback.handle_restart(3, "rank 1 was killed", cause="preemption", **new)
    callback.handle_resize(1, former=3, reason="rank 1 was killed", **new)
    callback.handle_result(step(5, num_ranks=1), **new)
    callback.finish_training(error=False, status="SUCCEEDED", exception=None, **new)
    if kit.losses:
        found = kit.losses(run_dir)
        assert sorted(set(found)) == [(number, float(number)) for number in (1, 2, 3, 4, 5)]
        assert len(found) <= 6


def test_finish_without_start_does_no_harm(kit, run_dir):
    callback = kit.make()
    callback.finish_training(error=True, status="FAILED", exception=ValueError("x"))
    callback.finish_training()
    start(callback, run_dir).handle_result(step(1))
    finish(callback, "SUCCEEDED")
    assert_logged(kit, run_dir, 1)


def test_finish_twice_does_no_harm(kit, run_dir):
    callback = start(kit.make(), run_dir)
    callback.handle_result(step(1))
    for status in ("SUCCEEDED", "FAILED"):
        finish(callback, status)
    assert_logged(kit, run_dir, 1)


def test_run_without_a_result_leaves_a_log(kit, run_dir):
    finish(start(kit.make(), run_dir), "STOPPED")
    assert not kit.losses or list(run_dir.iterdir())


ODD = {
    "nested": {"a": {"b": 1, "empty": {}}, "array": np.arange(3)},
    "array": np.array([[1.0, 2.0], [3.0, 4.0]]),
    "scalar_array": np.array(2.5),
    "numpy": np.float32(0.5),
    "tensor": torch.arange(3.0),
    "scalar_tensor": torch.tensor(1.5),
    "list": [1, [2, "x"], None],
    "nothing": None,
    "nan": float("nan"),
    "infinite": -math.inf,
    "text": 'of "two"\nlines, [bold]',
    "flag": True,
    "large": 2**70,
    "object": object(),
    "odd key! [/]": 1,
    5: 6,
}


def test_whatever_is_reported_is_taken(kit, run_dir):
    callback = start(kit.make(), run_dir)
    callback.handle_result(step(1, **{str(key): value for key, value in ODD.items()}))
    callback.handle_result(step(2))
    callback.handle_result([{**one, **ODD} for one in step(3)])
    finish(callback)
    assert_logged(kit, run_dir, 1, 2, 3)


def test_metric_that_a_rank_does_not_report(kit, run_dir):
    callback = start(kit.make(), run_dir)
    for number, (first, second) in enumerate(map(step, range(1, 5)), 1):
        if number in (2, 4):
            del first["loss"]
        if number in (3, 4):
            del second["loss"]
        callback.handle_result([first, second])
    finish(callback)
    assert_logged(kit, run_dir, 1, 3)


@for_loggers
def test_resumed_run_continues_what_is_there(kit, run_dir):
    for number, status in ((1, "FAILED"), (2, "STOPPED"), (3, "SUCCEEDED")):
        callback = start(kit.make(), run_dir, is_resumed=number > 1)
        callback.handle_result(step(number))
        finish(callback, status)
    assert_logged(kit, run_dir, 1, 2, 3)


def test_resumed_run_that_has_nothing_yet(kit, run_dir):
    callback = start(kit.make(), run_dir, is_resumed=True)
    callback.handle_result(step(7))
    finish(callback)
    assert_logged(kit, run_dir, 7)


def test_one_callback_serves_one_run_after_another(kit, run_dir):
    callback = kit.make()
    for number, status in ((1, "FAILED"), (2, "SUCCEEDED")):
        start(callback, run_dir.with_name(f"run_{number}"))
        callback.handle_result(step(number))
        finish(callback, status)
    for number in (1, 2):
        assert_logged(kit, run_dir.with_name(f"run_{number}"), number)


def test_folder_that_vanishes_spoils_no_later_run(kit, run_dir):
    """It may raise: then this run ends FAILED, as the page about callbacks says. It lets go all the same."""
    callback = start(kit.make(), run_dir)
    callback.handle_result(step(1))
    shutil.rmtree(run_dir, ignore_errors=True)
    with suppress(Exception):
        callback.handle_result(step(2, late=1))
        callback.handle_checkpoint(CHECKPOINT)
    with suppress(Exception):
        finish(callback, "FAILED")
    finish(callback, "FAILED")
    start(callback, run_dir.with_name("run_002"))
    callback.handle_result(step(3))
    finish(callback)
    assert_logged(kit, run_dir.with_name("run_002"), 3)


@for_loggers
def test_folder_that_cannot_be_one_is_an_error_before_anything_starts(kit, run_dir):
    run_dir.parent.mkdir()
    run_dir.write_text("a file")
    callback = kit.make()
    with pytest.raises(ArgumentError, match=f"{run_dir}.*a file is in the way"):
        start(callback, run_dir)
    finish(callback, "FAILED")
    assert run_dir.read_text() == "a file"
    start(callback, run_dir.with_name("run_002"))
    callback.handle_result(step(1))
    finish(callback)
    assert_logged(kit, run_dir.with_name("run_002"), 1)
