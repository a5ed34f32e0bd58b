"""Typed experiments on real workers: what is killed, resumed or resized counts every row once, and ends the same."""

import os

import pytest
import ray_data_experiment
import typed_experiment

import paceline
from paceline import LocalEngine, SGDCallback, Trainer
from paceline.data.prepared_cleaning import entries
from paceline.errors import TrainerStateError
from paceline.experiment import run_experiment, same_runs
from paceline.registry import EXPERIMENT_WORKER_MODULES


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


def test_run_that_failed_in_the_middle_of_an_epoch_is_resumed_there_by_its_folder(undisturbed):
    changes = ["cfg.seed=1", "cfg.start_workers=2", "models.net.block.dropout=0.1", "cfg.save_every=1"]
    with pytest.raises(RuntimeError, match="as asked"):
        run("failed", *changes, "cfg.fail_at=[1, 1]")
    assert Trainer.resume("failed") == undisturbed.values
    batches = paceline.load_run("failed").metrics.query("rank == 0 and epoch == 1 and batch.notna()")["batch"]
    assert batches.tolist() == [0, 1, 2]


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


def test_tool_that_one_rank_calls_alone_is_told():
    hasty = "tools.patience._target_=typed_experiment.HastyPatience"
    with pytest.raises(
        TrainerStateError, match=r"tools\.patience was called on rank 0, and not on all others within 1 s"
    ):
        run("alone", "cfg.start_workers=2", "cfg.num_epochs=1", "cfg.asks_alone=0", hasty)


def test_killed_run_on_prepared_batches_ends_like_the_undisturbed_one(undisturbed, tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_STORAGE", str(tmp_path))
    changes = ["cfg.seed=1", "cfg.start_workers=2", "models.net.block.dropout=0.1", "cfg.save_every=1"]
    prepared = run("prepared", *changes, "cfg.die_at=[1, 1]", prepare_batches=True)
    assert prepared.values == undisturbed.values
    assert len(entries(tmp_path / ".prepared")) == 2


@pytest.mark.timeout(600)
def test_experiment_trains_on_ray_as_here(undisturbed, ray_cluster):
    trained = run("on_ray", "cfg.start_workers=2", "cfg.seed=1", "models.net.block.dropout=0.1", engine="ray")
    assert trained.values == undisturbed.values
    assert paceline.load_run(trained.path).request["engine"] == "ray"


@pytest.mark.timeout(600)  # workers on Ray start as programs of their own, which takes long on a busy machine
def test_ray_data_is_read_by_ranks_that_are_killed_fail_and_are_resumed(ray_cluster):
    words = ["cfg.start_workers=2", "cfg.num_epochs=2", "cfg.die_at=[0, 1]", "cfg.fail_at=[1, 1]"]
    with pytest.raises(RuntimeError, match="as asked"):
        run("ray_data", *words, experiment=ray_data_experiment.OnRayData)
    assert Trainer.resume("ray_data") == [[[24.0, 8.0, 9.0]] * 2] * 2, "on each rank, in each epoch, of each dataset"
    recorded = paceline.load_run("ray_data")
    assert recorded.request["engine"] == "ray"
    assert [one["number"] for one in recorded.events if one["kind"] == "attempt"] == [0, 1, 2]


class Resizes(SGDCallback):
    """Takes the place of a worker away at one batch, and gives it back at another."""

    def __init__(self, engine):
        self._engine, self.sizes = engine, []

    def handle_result(self, results, **info):
        if (results[0]["epoch"], results[0].get("batch")) == (0, 1) and len(results) == 3:
            self._engine.slots = 2
        if (results[0]["epoch"], results[0].get("batch")) == (1, 0):
            self._engine.slots = 3

    def handle_resize(self, world_size, **info):
        self.sizes.append(world_size)


def test_group_that_shrinks_and_grows_counts_every_row_once():
    engine = LocalEngine(slots=3, preload=EXPERIMENT_WORKER_MODULES)
    resizes = Resizes(engine)
    words = ["cfg.start_workers=1", "cfg.max_workers=3", "cfg.save_every=1", "cfg.die_at=[0, 1]", "cfg.num_epochs=4"]
    trained = run("elastic", *words, engine=engine, callbacks=[resizes])
    assert resizes.sizes[0] == 2
    assert {tuple(value["rows"]) for value in trained.values} == {(24.0,) * 4}
    assert {len(value["history"]) for value in trained.values} == {4}
