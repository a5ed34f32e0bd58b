"""The session in this very process: what a report uses up, one run within another, and errors that a loop catches."""

import os
import threading

import pytest

import paceline
from paceline import BackendConfig, CheckpointStrategy, SGDCallback, Trainer, record_run
from paceline.errors import ArgumentError, TrainerStateError
from paceline.testing import ScriptedEngine, as_worker, returns
from paceline.workers.base import Call, Preload, Resources, Size
from paceline.workers.inline import InlineEngine


def inline():
    return Trainer(num_workers=0, backend=BackendConfig(), logdir="inline")


def test_report_that_cannot_be_sent_uses_up_no_number_and_no_time(monkeypatch):
    monkeypatch.setenv("SGD_RESULT_ENABLE_DETAILED_AUTOFILLED_METRICS", "1")
    with record_run(logdir="recorded") as run_dir:
        paceline.report(_time_this_iter_s=1.0)
        with pytest.raises(TypeError, match="lock"):
            paceline.report(_time_this_iter_s=10.0, lock=threading.Lock())
        paceline.report(_time_this_iter_s=1.0)
        paceline.save_checkpoint(step=2)
    run = paceline.load_run(run_dir)
    assert list(run.metrics.step) == [1, 2]
    assert list(run.metrics["_time_total_s"]) == [1.0, 2.0]
    assert [info.iteration for info in run.checkpoints] == [2], "it waits for no report that was never made"


def test_time_since_the_last_report_that_was_made():
    with as_worker() as wire:
        paceline.report()
        paceline.session.current()._last_report -= 100.0
        with pytest.raises(TypeError):
            paceline.report(lock=threading.Lock())
        paceline.report()
    assert wire.reports[-1]["_time_this_iter_s"] >= 100.0


def outer():
    paceline.report(i=0)
    paceline.save_checkpoint(i=0)
    with inline() as trainer:
        trainer.execute(paceline.world_rank)
        assert trainer.run(lambda: paceline.report(z=1) or "inner") == ["inner"]
    paceline.report(i=1)
    paceline.save_checkpoint(i=1)


def test_run_within_a_run_does_not_end_it():
    with inline() as trainer:
        trainer.run(outer)
    with record_run(logdir="recorded") as run_dir:
        outer()
    for path in (trainer.latest_run_dir.parent / "run_001", run_dir):
        run = paceline.load_run(path)
        assert (list(run.metrics.i), [info.id for info in run.checkpoints]) == ([0, 1], [1, 2])
    assert paceline.session.current() is None


def test_two_threads_at_once_are_refused():
    begun, go_on, values = threading.Event(), threading.Event(), []

    def wait():
        begun.set()
        assert go_on.wait(60)
        return paceline.session.current() is not None

    def run_first():
        with inline() as trainer:
            values.extend(trainer.run(wait))

    thread = threading.Thread(target=run_first)
    thread.start()
    try:
        assert begun.wait(60)
        with pytest.raises(TrainerStateError, match=r"num_workers=0.*another thread"), inline() as trainer:
            trainer.run(lambda: "both at once")
    finally:
        go_on.set()
        thread.join()
    assert values == [True], "the first goes on undisturbed"
    with inline() as trainer:
        assert trainer.run(lambda: "afterwards") == ["afterwards"]


def raised_by(fn, *args):
    group = InlineEngine().group(Size(0, 0), Resources(), Preload())
    events = []
    group.start()
    group.submit({0: Call(paceline.session.call_in_worker, (fn, args, {}))})
    group.poll(0.0, events.append)
    group.close()
    return events[0].traceback


def test_traceback_begins_with_the_users_own_line():
    def train():
        raise ValueError("mine")

    def report_badly():
        paceline.report({"loss": 1})

    text = raised_by(train)
    assert text.startswith("Traceback (most recent call last)")
    assert next(line for line in text.splitlines() if 'File "' in line).endswith("in train")
    assert "session.py" not in text
    text = raised_by(report_badly)
    files = [line.split('"')[1] for line in text.splitlines() if 'File "' in line]
    assert [os.path.basename(file) for file in files] == ["test_inline_run.py", "session.py"], "what they called stays"
    assert "session.py" in raised_by(paceline.report, 1), "all of it is ours"


def test_group_that_two_share_is_left_with_the_last_of_them():
    left = []
    first, second = (InlineEngine().group(Size(0, 0), Resources(), Preload()) for _ in range(2))
    first.start()
    first.submit({0: Call(lambda wire: wire.leaving.callback(left.append, "left"))})
    first.poll(0.0, lambda event: None)
    second.start()
    first.close()
    assert (left, "RANK" in os.environ) == ([], True)
    second.close()
    assert (left, "RANK" in os.environ) == (["left"], False)


class RaisesAtResults(SGDCallback):
    def handle_result(self, results, **info):
        raise ValueError(f"callback, step {results[0]['_training_iteration']}")


class RaisesAtCheckpoints(SGDCallback):
    def handle_checkpoint(self, checkpoint, **info):
        raise ValueError(f"callback, step {checkpoint.id}")


def heedless():
    for step in (1, 2):
        for act in (paceline.report, paceline.save_checkpoint):
            try:
                act(step=step)
            except ValueError:
                continue
    return "done"


@pytest.mark.parametrize("callback", [RaisesAtResults, RaisesAtCheckpoints])
def test_error_of_a_callback_ends_the_run_though_the_function_has_caught_it(callback):
    with inline() as trainer:
        with pytest.raises(ValueError, match="callback, step 1"):
            trainer.run(heedless, callbacks=[callback()])
        assert paceline.load_run(trainer.latest_run_dir).status.state == "FAILED"
        assert trainer.run(lambda: "next") == ["next"]
    with pytest.raises(ValueError, match="callback, step 1"), record_run(callbacks=[callback()], logdir="r") as path:
        heedless()
    assert paceline.load_run(path).status.state == "FAILED"


def test_error_of_a_callback_ends_the_run_though_the_function_makes_another_of_it():
    def function():
        try:
            paceline.report()
        except ValueError as error:
            raise KeyError("mine") from error

    with pytest.raises(ValueError, match="callback, step 1"), inline() as trainer:
        trainer.run(function, callbacks=[RaisesAtResults()])


def save_once():
    paceline.save_checkpoint(step=1)


@pytest.mark.parametrize("place", ["{tmp}/storage", "memory://{tmp}"])
def test_two_logdirs_of_one_name_do_not_share_a_place(tmp_path, place):
    strategy = CheckpointStrategy(num_to_keep=1, storage_path=place.format(tmp=tmp_path))
    with Trainer(num_workers=0, backend=BackendConfig(), logdir=tmp_path / "a" / "exp") as first:
        first.run(save_once, checkpoint_strategy=strategy)
        first.run(save_once, checkpoint_strategy=strategy)
    with Trainer(num_workers=0, backend=BackendConfig(), logdir=tmp_path / "b" / "exp") as second:
        with pytest.raises(ArgumentError, match=r"exp/run_001, which exists: another run.*another storage_path"):
            second.run(save_once, checkpoint_strategy=strategy)
        with pytest.raises(ArgumentError, match=r"exp/run_002, which exists"):
            record_run(logdir=tmp_path / "b" / "exp", checkpoint_strategy=strategy).__enter__()
        assert second.run(lambda: "done") == ["done"]
    assert [run.status.state for run in paceline.list_runs(tmp_path / "b")] == ["SUCCEEDED", "FAILED", "FAILED"]
    assert first.latest_checkpoint == {"step": 1}


def test_memory_is_no_place_for_several_processes():
    with Trainer(num_workers=1, backend=BackendConfig(), engine=ScriptedEngine([[[returns()]]]), logdir="x") as trainer:
        with pytest.raises(ArgumentError, match=r"memory://y.*memory of its own.*num_to_keep=0"):
            trainer.run(save_once, checkpoint_strategy=CheckpointStrategy(storage_path="memory://y"))
        assert not any(trainer.logdir.iterdir())
