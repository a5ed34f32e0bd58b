"""Typed experiments on real workers: what is killed, resumed or resized counts every row once, and ends the same."""

import os

import pytest
import typed_experiment

import paceline
from paceline import Trainer
from paceline.experiment import run_experiment, same_runs


def run(name, *overrides, experiment=typed_experiment.Exact, **options):
    return run_experiment(experiment, overrides=[f"cfg.name={name}", "cfg.num_epochs=3", *overrides], **options)


@pytest.fixture(scope="module")
def undisturbed():
    return run("undisturbed", "cfg.seed=1", "cfg.start_workers=2", "models.net.block.dropout=0.1")


def test_every_row_of_every_epoch_counts_once(undisturbed):
    assert [value["rows"] for value in undisturbed.values] == [[24.0] * 3] * 2
    metrics = paceline.load_run(undisturbed.path).metrics
    assert metrics.query("rank == 0")["mse"].tolist() == metrics.query("rank == 1")["mse"].tolist()
    one, other = undisturbed.values
    assert one == other


def test_run_folder_has_the_configuration(undisturbed):
    recorded = paceline.load_run(undisturbed.path)
    assert recorded.name == f"undisturbed/{undisturbed.path.name}"
    assert recorded.config["config_hash"] == undisturbed.config_hash
    assert recorded.config["experiment"] == "typed_experiment.Exact"
    assert recorded.config["models"]["net"]["block"]["dropout"] == 0.1
    assert recorded.request["function"]["name"] == "Exact"
    assert "      dropout: 0.1\n" in (undisturbed.path / "conf.yaml").read_text()
    assert undisturbed.path in [one.path for one in same_runs(undisturbed.config_hash)]


def test_configuration_of_a_run_gives_the_same_run_again(undisturbed):
    before = {one.path for one in same_runs(undisturbed.config_hash)}
    again = run_experiment(typed_experiment.Exact, undisturbed.path / "conf.yaml")
    assert again.config_hash == undisturbed.config_hash
    assert again.values == undisturbed.values
    assert {one.path for one in same_runs(again.config_hash)} == before | {again.path}


def test_killed_run_ends_like_the_undisturbed_one(undisturbed):
    changes = ["cfg.seed=1", "cfg.start_workers=2", "models.net.block.dropout=0.1"]
    killed = run("killed", *changes, "cfg.die_at=[1, 1]")
    assert killed.values == undisturbed.values
    assert [one["number"] for one in paceline.load_run(killed.path).events if one["kind"] == "attempt"] == [0, 1]


def test_stopped_run_ends_with_its_next_checkpoint(undisturbed, monkeypatch):
    monkeypatch.setenv("DRIVER_PID", str(os.getpid()))
    changes = ["cfg.seed=1", "cfg.start_workers=2", "models.net.block.dropout=0.1"]
    with pytest.raises(KeyboardInterrupt):
        run("stopped", *changes, "cfg.interrupt_at=[0, 1]", "cfg.num_epochs=1000")
    stopped = paceline.load_run("stopped")
    assert stopped.status.state == "STOPPED"
    assert 1 <= len(stopped.checkpoints) < 1000
    assert stopped.metrics.query("rank == 0")["epoch"].max() == len(stopped.checkpoints) - 1


def test_run_killed_in_the_middle_of_an_epoch_goes_on_there(undisturbed):
    changes = ["cfg.seed=1", "cfg.start_workers=2", "models.net.block.dropout=0.1", "cfg.save_every=1"]
    killed = run("killed_inside", *changes, "cfg.die_at=[1, 1]")
    assert killed.values == undisturbed.values
    batches = paceline.load_run(killed.path).metrics.query("rank == 0 and epoch == 1 and batch.notna()")["batch"]
    assert batches.tolist() == [0, 1, 2]


def test_failed_run_is_resumed_by_its_folder(undisturbed):
    changes = ["cfg.seed=1", "cfg.start_workers=2", "models.net.block.dropout=0.1"]
    with pytest.raises(RuntimeError, match="as asked"):
        run("failed", *changes, "cfg.fail_at=[1, 1]")
    assert Trainer.resume("failed") == undisturbed.values


def test_another_number_of_workers_goes_on_in_the_middle_of_an_epoch():
    with pytest.raises(RuntimeError, match="as asked"):
        run("before", "cfg.start_workers=2", "cfg.save_every=1", "cfg.fail_at=[1, 1]")
    before = paceline.load_run("before").path
    after = run("after", "cfg.start_workers=1", f"cfg.restore_checkpoint_path={before}")
    assert [value["rows"] for value in after.values] == [[24.0] * 3]
    assert [len(value["history"]) for value in after.values] == [3]


def test_rank_that_stops_takes_the_others_along():
    stopped = run("stopped", "cfg.start_workers=2", "cfg.stops_alone=1")
    assert [value["calls"] for value in stopped.values] == [1, 1]


def test_experiment_trains_on_ray_as_here(undisturbed, ray_cluster):
    trained = run("on_ray", "cfg.start_workers=2", "cfg.seed=1", "models.net.block.dropout=0.1", engine="ray")
    assert trained.values == undisturbed.values
    assert paceline.load_run(trained.path).request["engine"] == "ray"
