"""Trainers of other libraries, as they are, in our workers: what they log, save and go on from."""

import numpy as np
import pytest
from integration_ranks import fit_lightning, train_transformer, train_with_accelerate, train_with_fabric

import paceline
from paceline import CheckpointStrategy, LocalEngine, Trainer
from paceline.checkpoints import load


@pytest.fixture(scope="module")
def warm(lasts):
    """Two workers for all tests: each meets what the ones before have left in the process."""
    modules = [f"paceline.integrations.{name}" for name in ("fabric", "lightning", "transformers")]
    engine = LocalEngine(preload=[*modules, "omegaconf", "s3fs"])  # which Lightning imports when it trains
    with Trainer(backend="torch", num_workers=2, logdir="integrations", engine=engine) as trainer, lasts(trainer):
        yield trainer


@pytest.fixture(scope="module")
def undisturbed(warm, tmp_path_factory):
    """The weights and the run of a function to which nothing happens."""
    found = {}

    def undisturbed(function):
        if function not in found:
            weights = warm.run(function, {"output_dir": str(tmp_path_factory.mktemp("whole"))})
            found[function] = weights, paceline.load_run(warm.latest_run_dir)
        return found[function]

    return undisturbed


def assert_same(weights, others):
    for rank, (ours, theirs) in enumerate(zip(weights, others, strict=True)):
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(one, other, f"of rank {rank}")


def losses(run):
    frame = run.metrics.dropna(subset="loss")
    return frame.set_index(["global_step", "rank"])["loss"].to_dict()


def kinds(run):
    return [event["kind"] for event in run.events]


def test_script_of_accelerate_runs_as_it_is_and_again_with_another_precision(warm):
    plain = warm.run(train_with_accelerate, {"precision": "no"})
    assert [found[1:] for found in plain] == [(2, 0, "no"), (2, 1, "no")]
    assert_same(plain[0][:1], plain[1][:1])
    mixed = warm.run(train_with_accelerate, {"precision": "bf16"})
    assert [found[1:] for found in mixed] == [(2, 0, "bf16"), (2, 1, "bf16")]


def test_stateful_torchmetrics_synchronise_over_the_workers(warm):
    """Those of Ray do in test_trainer.py."""

    def train_func():
        import torchmetrics

        metric = torchmetrics.MeanMetric()
        metric.update(float(paceline.world_rank() * 10))
        return metric.compute().item()

    assert warm.run(train_func) == [5.0, 5.0]


@pytest.mark.parametrize(
    ("function", "killed_at", "num_reported", "score", "loader"),
    [
        # Not right after an epoch: what goes on from the checkpoint at its end leaves out the evaluation there.
        (train_transformer, (11, 1), 12, "eval_loss", {}),  # which is not known at the first checkpoints
        (fit_lightning, (15, 1), 5, "epoch", {}),
        (fit_lightning, (15, 1), 5, "epoch", {"num_workers": 1}),  # processes, which are asked for rows early
        (train_with_fabric, (3, 1), 5, "epoch", {}),
    ],
    ids=["transformers", "lightning", "lightning-loader-processes", "fabric"],
)
def test_worker_is_killed_and_the_end_is_the_same(
    warm, undisturbed, tmp_path, function, killed_at, num_reported, score, loader
):
    whole, whole_run = undisturbed(function)
    config = {"output_dir": str(tmp_path), "killed_at": killed_at, "loader": loader}
    weights = warm.run(function, config, checkpoint_strategy=CheckpointStrategy(2, score))
    run = paceline.load_run(warm.latest_run_dir)
    assert kinds(run).count("restart") == 1
    assert_same(weights, whole)
    assert losses(run) == losses(whole_run)
    assert len(losses(run)) == 2 * num_reported, "on two ranks"
    assert len(run.checkpoints) == 2, "the others were pruned"
    last, whole_last = (load(one.checkpoints[-1].path) for one in (run, whole_run))
    assert not (last.directory / "lock").exists(), "only what the library has written"
    assert (last.keys(), last[score]) == (whole_last.keys(), whole_last[score]), "also what was logged before the kill"


def test_fabric_whose_loader_has_processes_that_persist(warm, tmp_path):
    """They draw a seed when they begin, and not in each epoch."""
    config = {"output_dir": str(tmp_path), "loader": {"num_workers": 1, "persistent_workers": True}}
    whole = warm.run(train_with_fabric, config)
    assert_same(warm.run(train_with_fabric, {**config, "killed_at": (3, 1)}), whole)
    assert kinds(paceline.load_run(warm.latest_run_dir)).count("restart") == 1


def test_transformers_is_told_to_end_in_the_middle_of_an_epoch(warm, undisturbed, tmp_path):
    whole, _ = undisturbed(train_transformer)
    config = {"output_dir": str(tmp_path), "preempted_at": (7, 1), "arguments": {"save_strategy": "epoch"}}
    assert_same(warm.run(train_transformer, config), whole)
    run = paceline.load_run(warm.latest_run_dir)
    assert kinds(run).count("preempted") == 1
    first, *middle, last = (load(one.path)["global_step"] for one in run.checkpoints)
    assert (first, last) == (6, 12), "after each epoch, and none twice"
    assert all(6 < step < 12 for step in middle)
    assert len(run.metrics.dropna(subset="eval_loss")) == 4, "of two epochs on two ranks, and none of a part of one"


def test_transformers_that_has_made_its_last_step_makes_no_other(warm, tmp_path):
    """As after a kill between the last checkpoint and the end of the function."""
    in_an_epoch = {"max_steps": 4, "arguments": {"save_steps": 4, "lr_scheduler_type": "constant"}}
    config = {"output_dir": str(tmp_path), **in_an_epoch}
    whole = warm.run(train_transformer, config)
    assert_same(warm.run(train_transformer, config, checkpoint=warm.latest_checkpoint_path), whole)
    run = paceline.load_run(warm.latest_run_dir)
    assert (len(run.metrics), len(run.checkpoints)) == (0, 0)


def test_lightning_is_told_to_end_in_the_middle_of_an_epoch(warm, tmp_path):
    config = {"output_dir": str(tmp_path), "preempted_at": (2, 1), "min_epochs": 5, "callback": {"report_every": 4}}
    by_loss = CheckpointStrategy(checkpoint_score_attribute="val_loss", checkpoint_score_order="min")
    warm.run(fit_lightning, config, checkpoint_strategy=by_loss)  # which no checkpoint of the first epoch has
    run = paceline.load_run(warm.latest_run_dir)
    assert kinds(run).count("preempted") == 1
    saved = [load(one.path)["global_step"] for one in run.checkpoints]
    assert sorted(set(saved)) == saved, "none twice"
    assert {6, 12, 18, 24, 30} <= set(saved)
    assert len(saved) <= 6, "and one in the middle, unless all ranks came to the end of the epoch"
    on_rank_0 = run.metrics[run.metrics["rank"] == 0]
    assert {4, 8, 16, 20, 28} <= set(on_rank_0["global_step"])
    assert run.status.progress == 1
    assert on_rank_0["logged_last"].dropna().max() == 4, "what the model logs at the very end of an epoch is there"


def test_outside_of_a_run_the_trainers_train_as_ever(warm, undisturbed, tmp_path):
    """As under plain python or torchrun: there are ranks, and no session."""
    num_runs = len(paceline.list_runs(warm.logdir))
    for function in (train_transformer, fit_lightning, train_with_fabric):
        assert_same(warm.execute(function, {"output_dir": str(tmp_path)}), undisturbed(function)[0])
    assert len(paceline.list_runs(warm.logdir)) == num_runs
