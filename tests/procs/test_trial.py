"""Trials: what they compute, in which order hooks come, what is kept, and that they go on as if nothing had been."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from one_weight import ROWS, OneWeight, Rows, expected_weights, train

import paceline
from paceline import Trainer, load_run, pytorch
from paceline.errors import ArgumentError, ArgumentTypeError, DataError
from paceline.pytorch import Batch, Epoch, Record

BATCHES = [ROWS[start : start + 4] for start in range(0, 24, 4)]


def test_weights_are_those_of_plain_descent(tmp_path):
    trial, result = train(tmp_path, Epoch(2))
    assert trial.weights == pytest.approx(expected_weights(BATCHES * 2), abs=1e-6)
    assert trial.indices == [(number // 6, number) for number in range(12)]
    assert (result.batches, result.epochs, result.records, result.reason) == (12, 2, 48, "finished")


def test_result_and_run_folder(tmp_path):
    _, result = train(tmp_path, Batch(10), validation_period=Batch(4), reporting_period=Batch(2))
    run = load_run(result.run_dir)
    assert run.status.state == "SUCCEEDED"
    frame = result.metrics
    training = frame.dropna(subset=["loss"])
    assert training["batches"].tolist() == [2, 4, 6, 8, 10]
    held_out = frame.dropna(subset=["validation_loss"])
    assert held_out["batches"].tolist() == [4, 8, 10]
    assert result.best_validation == held_out["validation_loss"].min()
    assert result.validation_metrics["validation_loss"] == held_out["validation_loss"].iloc[-1]
    best = paceline.read_checkpoint(result.best_checkpoint)
    assert best["batches"] == 10, "it gets better all the time"
    assert result.latest_checkpoint == result.best_checkpoint
    weight = best["models"][0]["0.weight"].item()
    rows = np.array(ROWS)
    assert result.best_validation == pytest.approx(np.mean(((weight - 1) * rows) ** 2), rel=1e-5)


def test_who_reads_the_log_sees_metrics_and_checkpoints(tmp_path, caplog):
    caplog.set_level("INFO", "paceline")
    _, result = train(tmp_path, Batch(4), validation_period=Batch(4))
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("paceline.pytorch")]
    training, held_out = result.training_metrics["loss"], result.validation_metrics["validation_loss"]
    assert lines == [
        f"batches 4  epochs 0  records 16  loss {training:.4g}",
        f"batches 4  epochs 0  records 16  validation_loss {held_out:.4g}",
        f"Saved {result.latest_checkpoint}",
    ]


@pytest.mark.parametrize(("policy", "expected"), [("all", [2, 4, 6, 8]), ("best", [2, 8]), ("none", [8])])
def test_policy_decides_which_checkpoints_stay(tmp_path, policy, expected):
    class Worse(OneWeight):
        def evaluate_batch(self, batch):
            return {"validation_loss": float(self.context.current_train_batch()), "other": 1.0}

    with pytorch.init(hparams={"global_batch_size": 4}, logdir=tmp_path) as context:
        trainer = pytorch.Trainer(Worse(context), context)
        result = trainer.fit(max_length=Batch(8), validation_period=Batch(2), checkpoint_policy=policy)
    kept = [paceline.read_checkpoint(info.path)["batches"] for info in load_run(result.run_dir).checkpoints]
    assert kept == expected
    if policy == "best":
        assert paceline.read_checkpoint(result.best_checkpoint)["batches"] == 2
    assert paceline.read_checkpoint(result.latest_checkpoint)["batches"] == 8


def test_best_checkpoint_is_there(tmp_path):
    """Of equals the newest stays, and is what the result names; after a restart it is still known."""

    class Constant(OneWeight):
        def evaluate_batch(self, batch):
            return {"accuracy": 1.0 if self.context.current_train_batch() < 6 else 2.0}

    def run(length, **options):
        with pytorch.init(hparams={"global_batch_size": 4}, logdir=tmp_path) as context:
            fit = pytorch.Trainer(Constant(context), context).fit
            return fit(max_length=Batch(length), validation_period=Batch(2), **options)

    result = run(6)
    [info] = load_run(result.run_dir).checkpoints
    assert result.best_checkpoint == result.latest_checkpoint == info.path
    again = run(8, latest_checkpoint=result.latest_checkpoint)
    assert (again.best_validation, again.best_checkpoint) == (1.0, result.best_checkpoint)


def test_all_checkpoints_stay_if_nobody_can_tell_which_is_best(tmp_path, caplog):
    class Unclear(OneWeight):
        def evaluate_batch(self, batch):
            return {"precision": 1.0, "recall": 1.0}

    with pytorch.init(hparams={"global_batch_size": 4}, logdir=tmp_path) as context:
        result = pytorch.Trainer(Unclear(context), context).fit(max_length=Batch(6), validation_period=Batch(2))
    kept = [paceline.read_checkpoint(info.path)["batches"] for info in load_run(result.run_dir).checkpoints]
    assert kept == [2, 4, 6]
    assert [record.getMessage() for record in caplog.records if "fit(metric=" in record.getMessage()] == [
        "Which checkpoint is best cannot be told of the metrics precision, recall, so all are kept: name one, "
        "fit(metric=...)."
    ]


def test_larger_may_be_better(tmp_path):
    class Growing(OneWeight):
        def evaluate_batch(self, batch):
            return {"f1": [0.1, 0.7, 0.3, 0.2][self.context.current_train_batch() // 2], "loss": 1.0}

    for policy in ("best", "all"):
        with pytorch.init(hparams={"global_batch_size": 4}, logdir=tmp_path) as context:
            fit = pytorch.Trainer(Growing(context), context).fit
            periods = {"max_length": Batch(8), "validation_period": Batch(2), "checkpoint_policy": policy}
            result = fit(**periods, metric="f1", smaller_is_better=False)
        assert result.best_validation == pytest.approx(0.7)
        assert paceline.read_checkpoint(result.best_checkpoint)["batches"] == 4


def test_reducer_for_training_and_validation_collects_each_on_its_own(tmp_path):
    class Counting(OneWeight):
        def __init__(self, context):
            super().__init__(context)
            self.count = context.wrap_reducer(len, "count")

        def train_batch(self, batch, epoch_idx, batch_idx):
            self.count.update(1)
            return super().train_batch(batch, epoch_idx, batch_idx)

        def evaluate_batch(self, batch):
            self.count.update(1)
            return {}

    with pytorch.init(hparams={"global_batch_size": 4}, logdir=tmp_path) as context:
        result = pytorch.Trainer(Counting(context), context).fit(max_length=Batch(8), validation_period=Batch(4))
    frame = result.metrics
    assert frame["count"].dropna().tolist() == [4, 4]
    assert frame["val_count"].dropna().tolist() == [6, 6]


def test_gradients_of_several_batches_are_one_step(tmp_path):
    trial, _ = train(tmp_path, Batch(6), aggregation_frequency=2)
    unions = [BATCHES[0] + BATCHES[1], BATCHES[2] + BATCHES[3], BATCHES[4] + BATCHES[5]]
    after = expected_weights(unions)
    assert trial.weights == pytest.approx([0.0, after[0], after[0], after[1], after[1], after[2]], abs=1e-6)


def test_aggregation_may_change_between_two_lengths(tmp_path):
    with pytorch.init(hparams={"global_batch_size": 4}, logdir=tmp_path) as context:
        trial = OneWeight(context)
        trainer = pytorch.Trainer(trial, context)
        trainer.train_for(Batch(3), aggregation_frequency=2)
        trainer.train_for(Batch(1), aggregation_frequency=1)
    assert trial.weights[2] == trial.weights[1]
    assert trial.weights[3] != trial.weights[2], "what waits is part of the next step"


def test_gradients_that_wait_survive_a_validation_without_a_batch(tmp_path):
    options = {"aggregation_frequency": 2}
    whole, _ = train(tmp_path, Batch(4), **options)
    _, part = train(tmp_path, Batch(3), checkpoint_policy="none", **options)

    class Unvalidated(pytorch.PyTorchCallback):
        def on_checkpoint_load_start(self, checkpoint):
            checkpoint["validated_at"] = -1

    again_options = {"latest_checkpoint": part.latest_checkpoint, "checkpoint_policy": "all", **options}
    _, again = train(tmp_path, Batch(3), {"callbacks": {"u": Unvalidated()}}, **again_options)
    assert again.latest_checkpoint != part.latest_checkpoint, "the validation was made up for, and saved"
    rest, _ = train(tmp_path, Batch(4), latest_checkpoint=again.latest_checkpoint, **options)
    assert rest.weights == whole.weights[3:]


def test_gradients_are_added_up_if_wanted(tmp_path):
    trial, _ = train(tmp_path, Batch(2), aggregation_frequency=2, average_aggregated_gradients=False)
    [mean] = expected_weights([BATCHES[0] + BATCHES[1]])
    assert trial.weights[-1] == pytest.approx(2 * mean, abs=1e-6)


class Noting(pytorch.PyTorchCallback):
    def __init__(self):
        self.notes = []

    def on_trial_startup(self, first_batch_idx, checkpoint_uuid):
        self.notes.append(
            f"trial_startup {first_batch_idx}{' ' + Path(checkpoint_uuid).name if checkpoint_uuid else ''}"
        )

    def on_trial_shutdown(self):
        self.notes.append("trial_shutdown")

    def on_training_start(self):
        self.notes.append("training_start")

    def on_training_epoch_start(self, epoch_idx):
        self.notes.append(f"epoch_start {epoch_idx}")

    def on_training_epoch_end(self, epoch_idx):
        self.notes.append(f"epoch_end {epoch_idx}")

    def on_training_workload_end(self, avg_metrics, batch_metrics):
        losses = [float(one["loss"]) for one in batch_metrics]
        assert avg_metrics["loss"] == pytest.approx(np.mean(losses))
        self.notes.append(f"workload_end {len(losses)}")

    def on_validation_start(self):
        self.notes.append("validation_start")

    def on_validation_epoch_start(self):
        self.notes.append("validation_epoch_start")

    def on_validation_epoch_end(self, outputs):
        self.notes.append(f"validation_epoch_end {len(outputs)}")

    def on_validation_end(self, metrics):
        self.notes.append(f"validation_end {', '.join(metrics)}")

    def on_checkpoint_load_start(self, checkpoint):
        self.notes.append("checkpoint_load_start")

    def on_checkpoint_save_start(self, checkpoint):
        checkpoint["extra"] = "mine"
        self.notes.append("checkpoint_save_start")

    def on_checkpoint_write_end(self, checkpoint_dir):
        (checkpoint_dir / "note.txt").write_text("hello")
        self.notes.append("checkpoint_write_end")

    def on_checkpoint_upload_end(self, uuid):
        self.notes.append(f"checkpoint_upload_end {Path(uuid).name}")

    def state_dict(self):
        return {"notes": len(self.notes)}

    def load_state_dict(self, state_dict):
        self.notes.append(f"load_state_dict {state_dict['notes']}")


SAVED = ["checkpoint_save_start", "checkpoint_write_end"]
VALIDATED = ["validation_start", "validation_epoch_start", "validation_epoch_end 6", "validation_end validation_loss"]


def test_hooks_come_in_their_order(tmp_path):
    noting = Noting()
    _, result = train(tmp_path, Epoch(2), {"callbacks": {"noting": noting}}, checkpoint_period=Batch(4))
    assert noting.notes == [
        "trial_startup 0", "training_start", "epoch_start 0",
        "workload_end 4", *SAVED, "checkpoint_upload_end checkpoint_000001",
        "epoch_end 0", "epoch_start 1",
        "workload_end 4", *SAVED, "checkpoint_upload_end checkpoint_000002",
        "epoch_end 1", "workload_end 4", *VALIDATED, *SAVED, "checkpoint_upload_end checkpoint_000003",
        "trial_shutdown",
    ]  # fmt: skip
    checkpoint = paceline.read_checkpoint(result.latest_checkpoint)
    assert checkpoint["extra"] == "mine"
    assert (checkpoint.directory / "note.txt").read_text() == "hello"
    again = Noting()
    train(tmp_path, Batch(13), {"callbacks": {"noting": again}}, latest_checkpoint=result.latest_checkpoint)
    assert again.notes[:5] == [
        "trial_startup 12 checkpoint_000003", "checkpoint_load_start", "load_state_dict 19", "training_start",
        "epoch_start 2",
    ]  # fmt: skip


def test_callback_may_write_no_files(tmp_path):
    class Silent(pytorch.PyTorchCallback):
        def on_checkpoint_write_end(self, checkpoint_dir):
            (checkpoint_dir / "empty").mkdir()

    _, result = train(tmp_path, Batch(1), {"callbacks": {"silent": Silent()}})
    assert paceline.read_checkpoint(result.latest_checkpoint).directory is None


def test_epoch_that_is_continued_does_not_begin(tmp_path):
    _, result = train(tmp_path, Batch(4))
    noting = Noting()
    train(tmp_path, Batch(7), {"callbacks": {"n": noting}}, latest_checkpoint=result.latest_checkpoint)
    assert [note for note in noting.notes if note.startswith("epoch_")] == ["epoch_end 0", "epoch_start 1"]


def test_asked_to_stop_at_the_last_batch(tmp_path):
    """It does not validate any more; that is made up for by whoever goes on."""

    class Stopping(OneWeight):
        def train_batch(self, batch, epoch_idx, batch_idx):
            if batch_idx == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().train_batch(batch, epoch_idx, batch_idx)

    with pytest.raises(SystemExit), pytorch.init(hparams={"global_batch_size": 4}, logdir=tmp_path) as context:
        result = pytorch.Trainer(Stopping(context), context).fit(max_length=Batch(4))
    assert (result.batches, result.reason, result.validation_metrics) == (4, "preempted", {})
    trial, again = train(tmp_path, Batch(4), latest_checkpoint=result.latest_checkpoint)
    assert trial.seen == []
    assert (again.reason, list(again.validation_metrics)) == ("finished", ["validation_loss"])


def test_context_knows_where_an_epoch_begins_and_ends(tmp_path):
    class Asking(OneWeight):
        def train_batch(self, batch, epoch_idx, batch_idx):
            asked = self.context
            assert (asked.current_train_batch(), asked.current_train_epoch()) == (batch_idx, epoch_idx)
            assert (asked.is_epoch_start(), asked.is_epoch_end()) == (batch_idx % 6 == 0, batch_idx % 6 == 5)
            return super().train_batch(batch, epoch_idx, batch_idx)

    with pytorch.init(hparams={"global_batch_size": 4}, logdir=tmp_path) as context:
        assert pytorch.Trainer(Asking(context), context).fit(max_length=Batch(8)).batches == 8


def test_counts_of_workloads_validations_and_checkpoints(tmp_path):
    for periods, expected in (
        ({}, (1, 1, 1)),
        ({"validation_period": Epoch(1)}, (2, 2, 2)),
        ({"checkpoint_period": Epoch(1)}, (2, 1, 2)),
    ):
        noting = Noting()
        train(
            tmp_path, Epoch(2), {"callbacks": {"n": noting}}, reporting_period=None, checkpoint_policy="all", **periods
        )
        names = [note.split()[0] for note in noting.notes]
        assert tuple(map(names.count, ("workload_end", "validation_end", "checkpoint_save_start"))) == expected


@pytest.mark.parametrize("kwargs", [{}, {"num_workers": 2}, {"amp": True}], ids=["plain", "workers", "amp"])
def test_resumed_training_is_the_same_bit_by_bit(tmp_path, kwargs):
    """With noise in the data, dropout, momentum, a scheduler, gradients of two batches; in the middle of an epoch."""
    kwargs = {"noise": True, "shuffle": True, **kwargs}
    options = {"init": {"seed": 3}, "aggregation_frequency": 2}
    whole, _ = train(tmp_path, Batch(20), kwargs, **options)
    first, result = train(tmp_path, Batch(9), kwargs, **options)
    second, _ = train(tmp_path, Batch(20), kwargs, latest_checkpoint=result.latest_checkpoint, **options)
    assert first.weights + second.weights == whole.weights
    assert first.seen + second.seen == whole.seen
    assert second.indices == whole.indices[9:]


def test_validation_that_was_due_at_a_preemption_is_made_up_for(tmp_path):
    class Ends(OneWeight):
        def train_batch(self, batch, epoch_idx, batch_idx):
            if batch_idx == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().train_batch(batch, epoch_idx, batch_idx)

    def validated(run):
        return run.metrics.dropna(subset="validation_loss")[["batches", "validation_loss"]].to_numpy().tolist()

    periods = {"validation_period": Batch(4), "reporting_period": Batch(1)}
    _, whole = train(tmp_path / "whole", Batch(8), **periods)
    with (
        pytest.raises(SystemExit),
        pytorch.init(hparams={"global_batch_size": 4}, logdir=tmp_path / "ended") as context,
    ):
        result = pytorch.Trainer(Ends(context), context).fit(max_length=Batch(8), **periods)
    assert (result.reason, result.batches, result.validation_metrics) == ("preempted", 4, {})
    train(tmp_path / "rest", Batch(8), latest_checkpoint=result.latest_checkpoint, **periods)
    rows = validated(load_run(whole.run_dir))
    assert [batches for batches, _ in rows] == [4, 8]
    assert validated(load_run(tmp_path / "rest")) == rows


def test_every_epoch_has_each_row_once_in_another_order(tmp_path):
    trial, _ = train(tmp_path, Epoch(2), {"shuffle": True}, init={"seed": 1})
    rows = [value for batch in trial.seen for value in batch]
    assert sorted(rows[:24]) == sorted(rows[24:]) == pytest.approx(ROWS)
    assert rows[:24] != rows[24:]


def test_warm_start_takes_weights_and_begins_at_the_first_batch(tmp_path):
    first, result = train(tmp_path, Batch(7))
    second, after = train(tmp_path, Batch(3), warm_start=result.latest_checkpoint)
    assert second.indices == [(0, 0), (0, 1), (0, 2)]
    assert second.weights == pytest.approx(expected_weights(BATCHES[:3], first.weights[-1]), abs=1e-6)
    assert after.batches == 3


def test_checkpoint_itself_may_be_given(tmp_path):
    _, result = train(tmp_path, Batch(4))
    trial, _ = train(tmp_path, Batch(5), latest_checkpoint=paceline.read_checkpoint(result.latest_checkpoint))
    assert trial.seen == [pytest.approx(BATCHES[4])]
    with pytest.raises(ArgumentTypeError, match=r"latest_checkpoint=...\) is a int; expected a checkpoint's path"):
        train(tmp_path, Batch(5), latest_checkpoint=3)


def test_what_a_checkpoint_cannot_hold_is_left_out(tmp_path):
    class Odd(OneWeight):
        def __init__(self, context):
            super().__init__(context)
            self.odd = context.wrap_reducer(lambda values: object(), "odd", for_training=False)

    hparams = {"global_batch_size": 4, "activation": torch.nn.ReLU}
    with pytorch.init(hparams=hparams, logdir=tmp_path) as context:
        result = pytorch.Trainer(Odd(context), context).fit(max_length=Batch(1))
    checkpoint = paceline.read_checkpoint(result.latest_checkpoint)
    assert checkpoint["trial"]["hparams"] == {"global_batch_size": 4}
    assert list(checkpoint["validation"]) == ["validation_loss"]
    assert list(result.validation_metrics) == ["validation_loss", "odd"]


def test_nothing_is_left_to_train(tmp_path):
    _, result = train(tmp_path, Batch(5))
    trial, again = train(tmp_path, Batch(5), latest_checkpoint=result.latest_checkpoint)
    assert trial.seen == []
    assert (again.batches, again.reason) == (5, "finished")
    assert again.validation_metrics == result.validation_metrics, "that of the checkpoint: it was not made again"


def test_records_and_step_zero(tmp_path):
    class Noted(Noting):
        pass

    noting = Noted()
    _, result = train(tmp_path, Record(30), {"callbacks": {"n": noting}}, step_zero_validation=True)
    assert (result.batches, result.records) == (8, 32)
    assert noting.notes[2:6] == VALIDATED


def test_rows_of_a_short_batch_are_counted_once(tmp_path):
    _, result = train(tmp_path, Epoch(2), {"rows": ROWS[:10]})
    assert (result.batches, result.records) == (6, 20)


def test_test_mode_trains_validates_and_saves_once(tmp_path):
    noting = Noting()
    trial, result = train(tmp_path, Epoch(50), {"callbacks": {"n": noting}}, test_mode=True)
    assert len(trial.seen) == 1
    assert "validation_epoch_end 1" in noting.notes
    assert len(load_run(result.run_dir).checkpoints) == 1
    trial, result = train(tmp_path, Epoch(50), test_mode=True, latest_checkpoint=result.latest_checkpoint)
    assert (len(trial.seen), result.batches) == (1, 2), "one further batch"


def test_step_by_step(tmp_path):
    with pytorch.init(hparams={"global_batch_size": 4}, logdir=tmp_path) as context:
        noting = Noting()
        trial = OneWeight(context, callbacks={"n": noting})
        trainer = pytorch.Trainer(trial, context)
        assert trainer.train_for(Batch(2)).batches == 2
        assert trainer.train_for(Batch(3)).batches == 5
        assert noting.notes.count("training_start") == 1
        assert trainer.fit(max_length=Batch(8)).batches == 8
    assert trial.weights == pytest.approx(expected_weights((BATCHES * 2)[:8]), abs=1e-6)
    assert noting.notes.count("trial_shutdown") == 1


def test_fit_again_goes_on(tmp_path):
    """In the middle of an epoch and of gradients that wait, as if it had been one."""
    kwargs, options = {"noise": True, "shuffle": True}, {"aggregation_frequency": 2}
    whole, _ = train(tmp_path, Batch(12), kwargs, init={"seed": 3}, **options)
    with pytorch.init(hparams={"global_batch_size": 4}, logdir=tmp_path, seed=3) as context:
        noting = Noting()
        trial = OneWeight(context, callbacks={"n": noting}, **kwargs)
        trainer = pytorch.Trainer(trial, context)
        trainer.fit(max_length=Batch(5), **options)
        trainer.fit(max_length=Batch(8), **options)
        assert trainer.fit(max_length=Batch(8), **options).batches == 8, "nothing is left"
        result = trainer.train_for(Batch(4), **options)
    assert trial.weights == whole.weights
    assert trial.indices == whole.indices
    assert (result.batches, result.epochs) == (12, 2)
    assert noting.notes.count("trial_startup 8 checkpoint_000002") == 2


class Stream(torch.utils.data.IterableDataset):
    """Nobody knows how long it is."""

    noise = False

    def __iter__(self):
        return iter(torch.tensor([value + self.noise * 0.01 * torch.rand(1).item()]) for value in ROWS)


def test_loader_without_a_length(tmp_path, monkeypatch):
    class Streaming(OneWeight):
        def build_training_data_loader(self):
            return pytorch.DataLoader(Stream(), 4)

    def run(length, noise=False, **options):
        with pytorch.init(hparams={"global_batch_size": 4}, logdir=tmp_path, seed=2) as context:
            trial = Streaming(context, noise=noise)
            return trial, pytorch.Trainer(trial, context).fit(max_length=length, **options)

    trial, result = run(Epoch(2))
    assert trial.seen == [pytest.approx(batch) for batch in BATCHES * 2]
    _, part = run(Batch(4))
    rest, _ = run(Epoch(2), latest_checkpoint=part.latest_checkpoint)
    assert rest.seen == [pytest.approx(batch) for batch in (BATCHES * 2)[4:]]
    assert result.epochs == 2
    monkeypatch.setattr(Stream, "noise", True)
    whole, _ = run(Batch(10), noise=True)
    for stop in (4, 6):  # within an epoch, where the next batch was read ahead, and at its end
        first, part = run(Batch(stop), noise=True)
        second, _ = run(Batch(10), noise=True, latest_checkpoint=part.latest_checkpoint)
        assert first.seen + second.seen == whole.seen
        assert first.weights + second.weights == whole.weights


def test_dataset_of_ours(tmp_path):
    data = paceline.data.from_numpy({"x": np.array(ROWS, np.float32)})

    class Ours(OneWeight):
        def build_training_data_loader(self):
            return pytorch.DataLoader(data, 4, columns={"label_column": None})

        def build_validation_data_loader(self):
            return pytorch.DataLoader(data, 4, columns={"label_column": None})

    def run(length, **options):
        with pytorch.init(hparams={"global_batch_size": 4}, logdir=tmp_path) as context:
            trial = Ours(context)
            return trial, pytorch.Trainer(trial, context).fit(max_length=length, **options)

    trial, result = run(Epoch(2))
    assert trial.seen == [pytest.approx(batch) for batch in BATCHES * 2]
    assert result.records == 48
    _, part = run(Batch(4))
    rest, _ = run(Epoch(2), latest_checkpoint=part.latest_checkpoint)
    assert rest.seen == [pytest.approx(batch) for batch in (BATCHES * 2)[4:]]


# --- several ranks --------------------------------------------------------------------------------------------------


def in_worker(config):
    """A trial in a Trainer's worker: what it has seen, and its weights."""
    with pytorch.init(hparams={"global_batch_size": 4}, seed=config.get("seed")) as context:
        trial = OneWeight(context, **config.get("trial", {}))
        if "kill_at" in config and paceline.load_checkpoint() is None:
            original = trial.train_batch

            def dying(batch, epoch_idx, batch_idx):
                if batch_idx == config["kill_at"] and context.distributed.rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(batch, epoch_idx, batch_idx)

            trial.train_batch = dying
        result = pytorch.Trainer(trial, context).fit(
            max_length=Batch(config["length"]), checkpoint_period=Batch(3), **config.get("fit", {})
        )
    return trial.seen, trial.weights, result


@pytest.fixture(scope="module")
def workers():
    with Trainer(backend="torch", engine="local", num_workers=2) as trainer:
        yield trainer


def test_two_ranks_compute_what_one_does(workers, tmp_path):
    (seen, weights, result), (others, others_weights, _) = workers.run(in_worker, {"length": 12})
    assert [sorted(mine + theirs) for mine, theirs in zip(seen, others, strict=True)] == [
        pytest.approx(batch) for batch in BATCHES * 2
    ]
    assert weights == others_weights == pytest.approx(expected_weights(BATCHES * 2), abs=1e-6)
    _alone, expected = train(tmp_path, Batch(12))
    assert result.validation_metrics["validation_loss"] == pytest.approx(expected.validation_metrics["validation_loss"])
    run = load_run(workers.latest_run_dir)
    assert run.status.state == "SUCCEEDED"
    assert (result.batches, result.epochs, result.records) == (12, 2, 48)


def test_ranks_shuffle_alike_without_a_seed(workers):
    (mine, _, _), (theirs, _, _) = workers.run(in_worker, {"length": 6, "trial": {"shuffle": True}})
    assert sorted(value for batch in mine + theirs for value in batch) == pytest.approx(ROWS), "each row once"


def test_rank_is_killed_and_the_trial_goes_on_as_if_nothing_had_been():
    config = {"length": 14, "seed": 5, "trial": {"noise": True, "shuffle": True}, "fit": {"aggregation_frequency": 2}}
    with Trainer(backend="torch", engine="local", num_workers=2, max_retries=1) as trainer:
        undisturbed = trainer.run(in_worker, config)
        disturbed = trainer.run(in_worker, {**config, "kill_at": 8})
    assert [event["kind"] for event in load_run(trainer.latest_run_dir).events].count("restart") == 1
    for (seen, weights, _), (seen_again, weights_again, result) in zip(undisturbed, disturbed, strict=True):
        first = 14 - len(seen_again)
        assert first in (3, 6), "from the last checkpoint on that counted when the rank was lost"
        assert seen_again == seen[first:]
        assert weights_again == weights[first:]
        assert result.batches == 14


def noted(config):
    noting = Noting()
    with pytorch.init(hparams={"global_batch_size": 4}) as context:
        trial = OneWeight(context, callbacks={"noting": noting})
        pytorch.Trainer(trial, context).fit(max_length=Batch(6), aggregation_frequency=2)
        is_exchanged = trial.model.require_backward_grad_sync
    return noting.notes, trial.weights, is_exchanged


def test_hooks_on_their_ranks_and_aggregation_over_ranks(workers):
    (notes, weights, is_exchanged), (others, others_weights, _) = workers.run(noted, {})
    saving = [note for note in notes if note.startswith("checkpoint_")]
    assert saving == ["checkpoint_save_start", "checkpoint_write_end", "checkpoint_upload_end checkpoint_000001"]
    assert [note for note in others if note.startswith("checkpoint_")] == saving[-1:], "rank 0 alone writes"
    assert [note for note in notes if not note.startswith("checkpoint_")] == [
        note.replace("end 2", "end 3") if note == "validation_epoch_end 2" else note
        for note in others
        if not note.startswith("checkpoint_")
    ]
    unions = [BATCHES[0] + BATCHES[1], BATCHES[2] + BATCHES[3], BATCHES[4] + BATCHES[5]]
    after = expected_weights(unions)
    assert weights == others_weights == pytest.approx([0.0, after[0], after[0], after[1], after[1], after[2]], abs=1e-6)
    assert is_exchanged, "the last batch was one at which gradients travel"


class TwoModels(OneWeight):
    """One is trained each time, the other at every second batch, compiled."""

    def __init__(self, context):
        super().__init__(context)
        self.other = context.wrap_model(torch.nn.Linear(1, 1, bias=False), compile={"backend": "eager"})
        self.second = context.wrap_optimizer(torch.optim.Adam(self.other.parameters(), lr=0.1))

    def train_batch(self, batch, epoch_idx, batch_idx):
        metrics = super().train_batch(batch, epoch_idx, batch_idx)
        if batch_idx % 2:
            self.context.backward(((self.other(batch) + batch) ** 2).mean())
            self.context.step_optimizer(
                self.second, clip_grads=lambda params: torch.nn.utils.clip_grad_norm_(params, 1)
            )
        return metrics


def test_several_models_and_optimizers(tmp_path):
    def run(length, **options):
        with pytorch.init(hparams={"global_batch_size": 4}, logdir=tmp_path, seed=1) as context:
            trial = TwoModels(context)
            result = pytorch.Trainer(trial, context).fit(max_length=length, **options)
            return result, [parameter.item() for parameter in trial.other.parameters()], trial.weight()

    whole = run(Batch(11))
    part = run(Batch(5))
    rest = run(Batch(11), latest_checkpoint=part[0].latest_checkpoint)
    assert rest[1:] == whole[1:]
    assert part[1] != whole[1]


def test_profile_is_told_and_drawn(tmp_path, capsys):
    with pytorch.init(hparams={"global_batch_size": 4}, logdir=tmp_path) as context:
        trainer = pytorch.Trainer(OneWeight(context), context)
        trainer.configure_profiler(enabled=True, begin_on_batch=2, end_after_batch=6)
        result = trainer.fit(max_length=Batch(10))
        assert list(context.get_tensorboard_path().iterdir())
    assert result.profile.num_steps == 5
    assert {line.name for line in result.profile.lines} >= {"dataloader", "forward", "backward", "step"}
    assert "The bottleneck is" in capsys.readouterr().out
    assert (result.run_dir / "profile.png").read_bytes().startswith(b"\x89PNG")
    with pytorch.init(hparams={"global_batch_size": 4}, logdir=tmp_path) as context:
        trainer = pytorch.Trainer(OneWeight(context), context)
        trainer.configure_profiler()
        assert trainer.fit(max_length=Batch(7)).profile.num_steps == 7, "also of the last moments"
    with pytorch.init(hparams={"global_batch_size": 4}, logdir=tmp_path) as context:
        trainer = pytorch.Trainer(OneWeight(context), context)
        assert trainer.fit(max_length=Batch(3), profiling_enabled=True).profile.num_steps == 3
    with pytest.raises(ArgumentError, match="it would end before it begins"):
        trainer.configure_profiler(begin_on_batch=5, end_after_batch=4)


def test_trace_of_some_batches(tmp_path):
    with pytorch.init(hparams={"global_batch_size": 4}, logdir=tmp_path) as context:
        trainer = pytorch.Trainer(OneWeight(context), context)
        trainer.configure_profiler(begin_on_batch=2, end_after_batch=3, trace=True)
        trainer.fit(max_length=Batch(10))
        text = (context.get_tensorboard_path() / "rank_0.pt.trace.json").read_text()
    steps = [event for event in json.loads(text)["traceEvents"] if event["name"] == "Optimizer.step#SGD.step"]
    assert len(steps) == 2


def stops(config):
    with pytorch.init(hparams={"global_batch_size": 4}) as context:
        trial = OneWeight(context)
        original = trial.train_batch

        def train_batch(batch, epoch_idx, batch_idx):
            if batch_idx == 4 and context.distributed.rank == 1:
                context.set_stop_requested(True)
            return original(batch, epoch_idx, batch_idx)

        trial.train_batch = train_batch
        trainer = pytorch.Trainer(trial, context)
        return trainer.fit(max_length=Batch(30), reporting_period=Batch(3)), trainer.fit(max_length=Batch(12))


def test_one_rank_asks_to_stop_and_all_do_once(workers):
    results = workers.run(stops, {})
    ends = [[(result.batches, result.reason) for result in ranks] for ranks in results]
    assert ends == [[(6, "stop requested"), (12, "finished")]] * 2


class Shared(torch.utils.data.IterableDataset):
    """Its author shares it out, and rank 0 has more."""

    def __iter__(self):
        rank = paceline.world_rank()
        return iter(torch.tensor([float(value)]) for value in range(rank, 10 if rank == 0 else 7, 2))


class SharedOut(OneWeight):
    """Validation data as well: by the dataset, or by a sampler."""

    by_sampler = False

    def build_training_data_loader(self):
        return pytorch.DataLoader(Shared(), 2)

    def build_validation_data_loader(self):
        if not self.by_sampler:
            return pytorch.DataLoader(Shared(), 2)
        sampler = torch.utils.data.DistributedSampler(Rows(), shuffle=False)
        return torch.utils.data.DataLoader(Rows(), 2, sampler=sampler)

    def evaluate_batch(self, batch):
        return {"rows": len(batch)}

    def evaluation_reducer(self):
        return pytorch.Reducer.SUM


def shared_out(config):
    found, latest = [], None
    for length, by_sampler in ((Batch(3), False), (Epoch(2), True)):
        with pytorch.init(hparams={"global_batch_size": 4}) as context:
            trial = SharedOut(context)
            trial.by_sampler = by_sampler
            result = pytorch.Trainer(trial, context).fit(
                max_length=length, reporting_period=Record(5), latest_checkpoint=latest
            )
            latest = result.latest_checkpoint
            found.append((trial.seen, (result.batches, result.epochs, result.records), result.validation_metrics))
    return found


def test_ranks_have_differently_many_batches(workers):
    """An epoch ends with the first that has no more, on all ranks and after a restart too; nobody waits in vain."""
    mine, theirs = workers.run(shared_out, {})
    assert [seen for seen, *_ in mine] == [[[0.0, 2.0], [4.0, 6.0], [0.0, 2.0]], [[4.0, 6.0]]]
    assert [seen for seen, *_ in theirs] == [[[1.0, 3.0], [5.0], [1.0, 3.0]], [[5.0]]]
    for (_, *found), (_, *others) in zip(mine, theirs, strict=True):
        assert found == others
    assert [lengths for _, lengths, _ in mine] == [(3, 1, 11), (4, 2, 14)]
    assert [metrics for *_, metrics in mine] == [{"rows": 8.0}, {"rows": 24.0}], "each row once"


class Texts(OneWeight):
    """Metrics of which there is no mean, not over ranks either."""

    def train_batch(self, batch, epoch_idx, batch_idx):
        metrics = super().train_batch(batch, epoch_idx, batch_idx)
        return {**metrics, "text": "a", "ragged": torch.zeros(1 + self.context.distributed.rank)}


class Remembering(pytorch.PyTorchCallback):
    def on_training_workload_end(self, avg_metrics, batch_metrics):
        self.found = avg_metrics, batch_metrics

    def on_checkpoint_upload_end(self, uuid):
        assert paceline.read_checkpoint(uuid)["batches"] == 2, "it is there"


def looked_at(config):
    """Rank 0 looks at the checkpoint's trial by itself, while the other is elsewhere."""
    remembering = Remembering()
    with pytorch.init(hparams={"global_batch_size": 4}) as context:
        trial = Texts(context, callbacks={"r": remembering})
        result = pytorch.Trainer(trial, context).fit(max_length=Batch(2))
        if context.distributed.is_chief:
            loaded = pytorch.load_trial_from_checkpoint_path(result.latest_checkpoint, OneWeight)
            assert loaded.weight() == trial.weight()
    return remembering.found


def test_metrics_without_a_mean_and_a_trial_for_one_rank(workers):
    for means, batches in workers.run(looked_at, {}):
        assert means == {"loss": pytest.approx(1.574118), "text": None, "ragged": None}
        assert [(one["text"], one["ragged"]) for one in batches] == [(None, None)] * 2


def two_in_a_row(config):
    weights = []
    with pytorch.init(hparams={"global_batch_size": 4}) as context:
        is_new = paceline.load_checkpoint() is None
        for number in range(2):
            trial = OneWeight(context)
            original = trial.train_batch

            def train_batch(batch, epoch_idx, batch_idx, number=number, original=original):
                if is_new and (number, batch_idx) == (1, 4):
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(batch, epoch_idx, batch_idx)

            trial.train_batch = train_batch
            trial.callbacks = {"settled": Settled()}
            pytorch.Trainer(trial, context).fit(max_length=Batch(6), checkpoint_period=Batch(3))
            weights.append(trial.weights)
    return weights


class Settled(pytorch.PyTorchCallback):
    """Makes training wait for every checkpoint."""

    def on_checkpoint_upload_end(self, uuid):
        pass


def test_second_trainer_of_a_run_is_killed():
    """The first does not take the other's checkpoint for its own; the second goes on."""
    with Trainer(backend="torch", engine="local", num_workers=1, max_retries=1) as trainer:
        [(first, second)] = trainer.run(two_in_a_row, {})
    assert first == pytest.approx(expected_weights(BATCHES), abs=1e-6)
    assert second == pytest.approx(expected_weights(BATCHES)[3:], abs=1e-6)


class Normalized(OneWeight):
    """Its model has buffers, which DDP gives to all ranks; there is one batch to validate on, for rank 0."""

    def __init__(self, context, **kwargs):
        super().__init__(context, **kwargs)
        self.norm = context.wrap_model(torch.nn.BatchNorm1d(1))

    def train_batch(self, batch, epoch_idx, batch_idx):
        self.norm(batch)
        return super().train_batch(batch, epoch_idx, batch_idx)

    def evaluate_batch(self, batch):
        return {"mean": self.norm(batch).mean()}

    def build_validation_data_loader(self):
        return pytorch.DataLoader(Rows([1.0, 2.0]), 2)


class AllAtOnce(Normalized):
    evaluate_batch = pytorch.PyTorchTrial.evaluate_batch

    def evaluate_full_dataset(self, data_loader):
        [batch] = data_loader
        return {"mean": self.norm(batch).mean()}


class Editing(pytorch.PyTorchCallback):
    """On one rank only it takes every validation for as good as the first."""

    def on_validation_end(self, metrics):
        if paceline.world_rank() == 0:
            metrics["mean"] = 5.0


def normalized(config):
    found = []
    for kind in (Normalized, AllAtOnce):
        with pytorch.init(hparams={"global_batch_size": 4}) as context:
            trial = kind(context, callbacks={"editing": Editing()} if config.get("edits") else {})
            result = pytorch.Trainer(trial, context).fit(
                max_length=Batch(6), validation_period=Batch(2), aggregation_frequency=3, step_zero_validation=True
            )
            found.append((result.validation_metrics["mean"], trial.norm.running_mean.item(), result.latest_checkpoint))
    return found


def test_ranks_validate_differently_often(workers):
    """One has no batch: nobody waits for it in the model's own collectives, and all have rank 0's statistics."""
    mine, theirs = workers.run(normalized, {})
    assert mine == theirs
    assert mine[0][:2] == mine[1][:2]


def test_hook_changes_metrics_on_one_rank_and_all_decide_alike(workers):
    mine, theirs = workers.run(normalized, {"edits": True})
    assert mine == theirs
    assert [mean for mean, *_ in mine] == [5.0, 5.0]


SCRIPT = """
import logging, os, sys
import torch.distributed as dist
import paceline as det
from paceline import core, pytorch
sys.path.insert(0, {tests!r})
from one_weight import OneWeight

def main():
    dist.init_process_group(backend="gloo")
    os.environ["USE_TORCH_DISTRIBUTED"] = "true"
    with det.pytorch.init(
        hparams={{"global_batch_size": 4}},
        distributed=core.DistributedContext.from_torch_distributed(chief_ip="localhost"),
        logdir={logdir!r},
    ) as train_context:
        trial = OneWeight(train_context)
        trainer = det.pytorch.Trainer(trial, train_context)
        trainer.configure_profiler(enabled=True, sync_timings=True, begin_on_batch=0, end_after_batch=10)
        result = trainer.fit(
            max_length=pytorch.Epoch(1), checkpoint_period=pytorch.Batch(10), validation_period=pytorch.Batch(10)
        )
    print(f"rank {{train_context.distributed.rank}}: {{trial.weights[-1]:.6f}} {{result.run_dir}}", flush=True)

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format=det.LOG_FORMAT)
    main()
"""


def test_seeds_script_under_torchrun(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(SCRIPT.format(tests=str(Path(__file__).parent), logdir=str(tmp_path / "results")))
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    [weight] = expected_weights(BATCHES)[-1:]
    said = dict(line.split(": ") for line in done.stdout.splitlines() if line.startswith("rank "))
    assert {line.split()[0] for line in said.values()} == {f"{weight:.6f}"}
    run = load_run(said["rank 0"].split()[1])
    assert run.status.state == "SUCCEEDED"
    [info] = run.checkpoints
    assert info.ranks == (0, 1), "each has its own part"


# --- mistakes -------------------------------------------------------------------------------------------------------


def test_mistakes_of_contexts(tmp_path):
    for size, error, said in (
        ("4", ArgumentTypeError, "is '4', a str; expected a whole number"),
        (2.0, ArgumentTypeError, "is 2.0, a float"),
        (0, ArgumentError, "less than a row for each of 1 ranks"),
    ):
        with pytest.raises(error, match=said), pytorch.init(hparams={"global_batch_size": size}, logdir=tmp_path):
            pass
    with pytorch.init(logdir=tmp_path) as context:
        with pytest.raises(ArgumentError, match="No batch size is known"):
            context.get_per_slot_batch_size()
        with pytest.raises(ArgumentError, match="There are no hyperparameters"):
            context.get_hparam("lr")
        with pytest.raises(paceline.errors.TrainerStateError, match="training has not begun"):
            context.current_train_batch()
        with pytest.raises(ArgumentTypeError, match=r"set_stop_requested\(1\)"):
            context.set_stop_requested(1)
        model = context.wrap_model(torch.nn.Linear(1, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        mode = pytorch.LRScheduler.StepMode
        with pytest.raises(ArgumentError, match="the optimizer of this scheduler is not wrapped"):
            context.wrap_lr_scheduler(scheduler, mode.STEP_EVERY_BATCH)
        context.wrap_optimizer(optimizer)
        with pytest.raises(ArgumentTypeError, match="step_mode is 'batch'"):
            context.wrap_lr_scheduler(scheduler, "batch")
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        with pytest.raises(ArgumentError, match="ReduceLROnPlateau steps with a metric"):
            context.wrap_lr_scheduler(plateau, mode.STEP_EVERY_EPOCH)
        with pytest.raises(ArgumentError, match="backward_passes_per_step=0"):
            context.wrap_optimizer(optimizer, backward_passes_per_step=0)
        with pytest.raises(paceline.errors.TrainerStateError, match="before the first wrap_model"):
            context.wrap_scaler(torch.amp.GradScaler("cpu", enabled=False))


def test_mistakes_of_trials(tmp_path):
    with pytest.raises(ArgumentError, match=r"fit.. was given no max_length"):
        train(tmp_path, None)

    class Keeping(OneWeight):
        def train_batch(self, batch, epoch_idx, batch_idx):
            self.context.backward(self.model(batch).sum())
            self.context.step_optimizer(self.optimizer, auto_zero_grads=False)

    with (
        pytest.raises(ArgumentError, match=r"auto_zero_grads=False. with aggregation_frequency=2"),
        pytorch.init(hparams={"global_batch_size": 4}, aggregation_frequency=2, logdir=tmp_path) as context,
    ):
        pytorch.Trainer(Keeping(context), context).fit(max_length=Batch(1))
    with pytest.raises(DataError, match="training data is empty"):
        train(tmp_path, Batch(1), {"rows": []})

    class Listing(OneWeight):
        def build_training_data_loader(self):
            return [torch.tensor([[1.0]])]

    with (
        pytest.raises(ArgumentTypeError, match=r"build_training_data_loader\(\) returned a list"),
        pytorch.init(hparams={"global_batch_size": 4}, logdir=tmp_path) as context,
    ):
        pytorch.Trainer(Listing(context), context).fit(max_length=Batch(1))
    with pytorch.init(hparams={"global_batch_size": 4}, logdir=tmp_path) as context:
        context.experimental.disable_dataset_reproducibility_checks()
        assert pytorch.Trainer(Listing(context), context).fit(max_length=Epoch(3)).batches == 3, (
            "it is looped over again"
        )


def test_ids_are_names_of_folders(tmp_path):
    with pytorch.init(hparams={"global_batch_size": 4}, logdir=tmp_path / "digits") as context:
        assert (context.get_experiment_id(), context.get_trial_id()) == ("digits", "run_001")


def test_checkpoint_of_something_else(tmp_path):
    with paceline.record_run(logdir=tmp_path) as run_dir:
        paceline.save_checkpoint(epoch=3)
    [info] = load_run(run_dir).checkpoints
    with pytest.raises(ArgumentError, match=r"was not saved by a pytorch.Trainer: it has 'epoch'"):
        train(tmp_path, Batch(1), latest_checkpoint=info.path)


def test_trial_comes_back_from_a_checkpoint(tmp_path):
    trial, result = train(tmp_path, Batch(5))
    loaded = pytorch.load_trial_from_checkpoint_path(result.latest_checkpoint, OneWeight)
    assert loaded.weight() == trial.weight()
    loaded = pytorch.load_trial_from_checkpoint_path(
        result.latest_checkpoint, OneWeight, torch_load_kwargs={"map_location": "cpu"}
    )
    assert loaded.weight() == trial.weight()
    with pytest.raises(ArgumentError, match="say trusted=True"):
        pytorch.load_trial_from_checkpoint_path(result.latest_checkpoint)
    loaded = pytorch.load_trial_from_checkpoint_path(result.latest_checkpoint, trusted=True)
    assert type(loaded) is OneWeight


def test_plain_loop_over_the_loader():
    loader = pytorch.DataLoader(Rows(), batch_size=10)
    assert [len(batch) for batch in loader] == [10, 10, 4]
    assert len(loader) == 3
    with pytest.raises(ValueError, match="mutually exclusive"):
        pytorch.DataLoader(Rows(), batch_size=2, shuffle=True, sampler=range(3))
    with pytest.raises(ArgumentError, match="batch_size=None"):
        pytorch.DataLoader(Rows(), batch_size=None)
