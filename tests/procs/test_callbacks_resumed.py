"""What loggers leave of a run that a second driver has resumed."""

import csv
import json

import pytest

from paceline import CSVLoggerCallback, JsonLoggerCallback, TBXLoggerCallback, Trainer
from paceline.session import load_checkpoint, report, save_checkpoint


def train(config):
    state = load_checkpoint() or {"step": 0}
    for step in range(state["step"] + 1, 7):
        report(step=step)
        if step == 2:
            save_checkpoint(step=step)
        if step == 4:
            raise ZeroDivisionError


def train_to_the_end(config):
    for step in range(load_checkpoint()["step"] + 1, 7):
        report(step=step, mended=1)


def test_loggers_continue_where_the_failed_driver_stopped(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def callbacks():
        return [JsonLoggerCallback(), CSVLoggerCallback(), TBXLoggerCallback()]

    with Trainer("torch", num_workers=1, logdir=tmp_path / "t") as trainer:
        with pytest.raises(ZeroDivisionError):
            trainer.run(train, callbacks=callbacks())
        run_dir = trainer.latest_run_dir
    Trainer.resume(run_dir, train_to_the_end, callbacks())

    logged = json.loads((run_dir / "results.json").read_text())
    reported = [element[0]["step"] for element in logged]
    assert reported == [1, 2, 3, 4, 3, 4, 5, 6], "steps after the checkpoint were made again"
    with (run_dir / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(int(row["step"]), row["mended"]) for row in rows] == [
        (step, "1" if index >= 4 else "") for index, step in enumerate(reported)
    ]
    curve = EventAccumulator(str(run_dir)).Reload().Scalars("step")
    assert [event.step for event in curve] == [1, 2, 3, 4, 5, 6]
