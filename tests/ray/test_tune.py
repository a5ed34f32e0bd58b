"""Trials of Ray Tune: what a scheduler does to them, what they cost, and what they leave."""

import os
import threading

import pytest
import tensorboardX  # noqa: F401  # it sets an environment variable when Tune imports it, which is no leak of a test
from ray import tune
from ray.tune import schedulers
from trials import climb, lose_a_worker, stumble, training_func

import paceline
from paceline import BackendConfig, CheckpointStrategy, RayEngine, Trainer, load_run
from paceline.errors import ArgumentError, ArgumentTypeError, MissingDependencyError, TrainerStateError

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.fixture
def fit(tmp_path):
    """Runs an experiment to its end; the workers of a trial are kept for the next one."""

    def fit(trainable, space, num_at_once=1, reuse_actors=True, **options):
        run_options = {name: options.pop(name) for name in ("callbacks", "failure_config", "stop") if name in options}
        tuner = tune.Tuner(
            trainable,
            param_space=space,
            tune_config=tune.TuneConfig(reuse_actors=reuse_actors, max_concurrent_trials=num_at_once, **options),
            run_config=tune.RunConfig(storage_path=str(tmp_path / "tune"), verbose=0, **run_options),
        )
        return tuner.fit()

    return fit


def trainer_for(tmp_path, **arguments):
    return Trainer(**{"backend": BackendConfig(), "num_workers": 1, "logdir": tmp_path / "runs", **arguments})


def runs(trainer):
    """By trial id."""
    return {run.request["parent"]["trial_id"]: run for run in paceline.list_runs(trainer.logdir)}


class TakenCPUs(tune.Callback):
    """Sees that trials take as many CPUs of the cluster as they should. It says so a moment after it is so."""

    def __init__(self, ray, expected, wait_until):
        self.ray, self.expected, self.wait_until, self.num_seen = ray, expected, wait_until, 0

    def on_trial_result(self, iteration, trials, trial, result, **info):
        self.wait_until(lambda: self.taken() == self.expected, f"{self.expected} taken CPUs")
        self.num_seen += 1

    def taken(self):
        return self.ray.cluster_resources()["CPU"] - self.ray.available_resources().get("CPU", 0)


class Results(tune.Callback):
    """What Tune got, by trial. Its own files may lose the first results of a trial that goes on: when a trial is
    restored, Tune takes them back from storage, to which it copies them only now and then."""

    def __init__(self, name):
        self.name, self.seen = name, {}

    def on_trial_result(self, iteration, trials, trial, result, **info):
        self.seen.setdefault(trial.trial_id, []).append(result[self.name])


# --- the seed's example ----------------------------------------------------------------------------------------------


def test_seed_example_on_warm_torch_workers(tmp_path, capsys):
    trainer = Trainer(backend="torch", num_workers=2, logdir=tmp_path / "runs")
    trainable = trainer.to_tune_trainable(training_func)
    analysis = tune.run(
        trainable,
        config={"num_epochs": 2, "input": tune.grid_search([1, 2, 3])},
        reuse_actors=True,
        max_concurrent_trials=1,
        storage_path=str(tmp_path / "tune"),
        verbose=0,
    )
    print(analysis.get_best_config(metric="output", mode="max"))
    assert capsys.readouterr().out.endswith("{'num_epochs': 2, 'input': 3}\n")

    results = [trial.last_result for trial in analysis.trials]
    assert [result["training_iteration"] for result in results] == [2, 2, 2]
    assert len({result["worker_pid"] for result in results}) == 1, "the workers of a trial serve the next one"
    for trial, run in zip(analysis.trials, (runs(trainer)[trial.trial_id] for trial in analysis.trials), strict=True):
        parent = run.request["parent"]
        assert (parent["kind"], parent["trial_dir"]) == ("tune", trial.path)
        assert parent["experiment"] == os.path.basename(os.path.dirname(trial.path))
        assert run.status.state == "SUCCEEDED"
        assert run.config == trial.config
        assert run.metrics["output"].tolist() == [trial.config["input"]] * 4, "two steps of two ranks"


def test_workers_of_a_trial_can_be_local_processes(tmp_path, fit, ray_cluster, wait_until):
    trainer = trainer_for(tmp_path, num_workers=2, engine="local", cpus_per_worker=0.5)
    cpus = TakenCPUs(ray_cluster, 1, wait_until)
    results = fit(
        trainer.to_tune_trainable(training_func),
        {"num_epochs": 2, "input": tune.grid_search([1, 2, 3])},
        callbacks=[cpus],
    )
    assert results.get_best_result("output", "max").config == {"num_epochs": 2, "input": 3}
    assert len({result.metrics["worker_pid"] for result in results}) == 1
    assert cpus.num_seen == 6
    assert {run.request["engine"] for run in runs(trainer).values()} == {"local"}


# --- schedulers ------------------------------------------------------------------------------------------------------


def test_asha_stops_trials_where_they_are(tmp_path, fit):
    trainer = trainer_for(tmp_path)
    results = fit(
        trainer.to_tune_trainable(climb),
        {"speed": tune.grid_search([4, 3, 2, 1]), "num_steps": 1000},
        scheduler=schedulers.ASHAScheduler(max_t=4, grace_period=2, reduction_factor=2),
        metric="score",
        mode="max",
    )
    num_steps = {result.config["speed"]: result.metrics["training_iteration"] for result in results}
    assert num_steps[4] == 4, "the best one gets all the time"
    assert num_steps[1] == 2, "the worst one is stopped at the first rung"
    for run in runs(trainer).values():
        assert (run.status.state, run.status.reason) == (
            "STOPPED",
            "Ray Tune stopped the trial, or paused it to go on later",
        )
        assert run.metrics["step"].max() == num_steps[run.config["speed"]], "nobody trains on while Tune decides"
    best = results.get_best_result()
    assert paceline.read_checkpoint(best.checkpoint.path)["made_with"] == [4] * 4


@pytest.mark.parametrize("reuse_actors", [True, False], ids=["reused", "anew"])
def test_pbt_continues_a_bad_trial_from_the_checkpoint_of_a_good_one(tmp_path, fit, reuse_actors):
    # With two at work and actors that are kept for others, both trials were in one actor now and then, and Tune ended
    # the first of them in the middle. So one trial takes the whole cluster there: they take turns in one actor.
    trainer = trainer_for(tmp_path, cpus_per_worker=8 if reuse_actors else 1)
    num_steps = 5 if reuse_actors else 3
    results = fit(
        trainer.to_tune_trainable(climb),
        {"speed": tune.grid_search([1, 100]), "num_steps": num_steps},
        num_at_once=None,
        reuse_actors=reuse_actors,
        metric="score",
        mode="max",
        scheduler=schedulers.PopulationBasedTraining(
            time_attr="training_iteration",
            perturbation_interval=2,
            hyperparam_mutations={"speed": [7]},
            resample_probability=1.0,
            quantile_fraction=0.5,
            synch=True,
        ),
    )
    assert not results.errors
    histories = sorted(result.metrics["made_with"] for result in results)
    expected = [[*[100] * (num_steps - 1), 7], [100] * num_steps]
    assert histories == expected, "after steps 2 and 4 it takes over what the other one has"
    [bad] = [run for run in runs(trainer).values() if run.config["speed"] == 1]
    assert bad.metrics["step"].tolist() == list(range(1, num_steps + 1))
    assert len(list(trainer.logdir.glob("run_*"))) == 2, "each goes on in its own folder"


class PauseOnce(schedulers.FIFOScheduler):
    """Pauses every trial after its second step."""

    def __init__(self):
        super().__init__()
        self.paused = set()

    def on_trial_result(self, tune_controller, trial, result):
        if result["training_iteration"] == 2 and trial.trial_id not in self.paused:
            self.paused.add(trial.trial_id)
            return self.PAUSE
        return self.CONTINUE


def test_paused_trial_goes_on_where_it_was_in_its_own_folder(tmp_path, fit):
    trainer = trainer_for(tmp_path)
    scheduler = PauseOnce()
    space = {"speed": tune.grid_search([1, 2]), "num_steps": 4}
    told = Results("training_iteration")
    results = fit(trainer.to_tune_trainable(climb), space, scheduler=scheduler, callbacks=[told])
    assert len(scheduler.paused) == 2
    assert [result.metrics["score"] for result in results] == [4, 8]
    assert list(told.seen.values()) == [[1, 2, 3, 4]] * 2
    for run in runs(trainer).values():
        assert run.status.state == "SUCCEEDED"
        assert run.metrics["step"].tolist() == [1, 2, 3, 4]
        assert [event["state"] for event in run.events if event["kind"] == "end"] == ["STOPPED", "SUCCEEDED"]


# --- failures --------------------------------------------------------------------------------------------------------


def test_trial_that_raises_is_tried_again_from_its_checkpoint(tmp_path, fit):
    trainer = trainer_for(tmp_path)
    told, again = Results("num_steps"), tune.FailureConfig(max_failures=1)
    [mended] = fit(trainer.to_tune_trainable(stumble), {}, failure_config=again, callbacks=[told])
    assert mended.error is None
    # It goes on from what was saved last; the last result comes again with the checkpoint that was saved after it.
    assert told.seen[mended.metrics["trial_id"]] == [1, 2, 3, 4, 4]
    assert paceline.read_checkpoint(mended.checkpoint.path) == {"num_steps": 4, "num_tries": 2}
    assert mended.metrics["num_tries"] == 2
    assert [run.status.state for run in runs(trainer).values()] == ["SUCCEEDED"]
    assert len(list(trainer.logdir.glob("run_*"))) == 1


def test_trial_that_raises_and_may_not_try_again_has_failed(tmp_path, fit):
    trainer = trainer_for(tmp_path)
    [failed] = fit(trainer.to_tune_trainable(stumble), {})
    assert isinstance(failed.error, LookupError)
    assert "no third step" in str(failed.error)
    assert [run.status.state for run in runs(trainer).values()] == ["FAILED"]


def test_worker_is_killed_in_a_trial_and_resources_are_exact(tmp_path, fit, ray_cluster, wait_until):
    trainer = trainer_for(tmp_path, num_workers=2, cpus_per_worker=0.75, engine=RayEngine(spare_workers=1))
    cpus = TakenCPUs(ray_cluster, 2.25, wait_until)  # two workers, one spare, nothing else
    strategy = CheckpointStrategy(num_to_keep=1)
    trainable = trainer.to_tune_trainable(lose_a_worker, all_ranks=True, checkpoint_strategy=strategy)
    [result] = fit(trainable, {}, callbacks=[cpus])
    assert result.error is None
    assert list(result.metrics_dataframe["training_iteration"]) == [1, 2, 3, 3]
    assert paceline.read_checkpoint(result.checkpoint.path) == {"num_steps": 3}, "saved after the last report"
    assert (result.metrics["rank"], result.metrics["rank_1"]["rank"]) == (0, 1)
    assert result.metrics["cwd"] == os.getcwd(), "the function runs where it would have run without Tune"
    run = load_run(trainer.logdir)
    assert "worker_died" in [event["kind"] for event in run.events]
    assert cpus.num_seen == 4


def test_max_retries_and_other_arguments_are_the_trainers(tmp_path, fit):
    trainer = trainer_for(tmp_path, num_workers=2, max_retries=0)
    [result] = fit(trainer.to_tune_trainable(lose_a_worker), {})
    assert "max_retries=0" in str(result.error)


# --- without to_tune_trainable ---------------------------------------------------------------------------------------


def test_tune_function_that_builds_a_trainer_uses_the_bundles_of_its_trial(tmp_path, fit, ray_cluster, wait_until):
    def train(config):
        for _ in range(2):
            paceline.report(output=config["input"])

    def tune_by_hand(config):
        trainer = Trainer(backend=BackendConfig(), num_workers=2, logdir=config["logdir"])
        for reports in trainer.run_iterator(train, {"input": config["input"]}):
            tune.report({"output": reports[1]["output"]})
        trainer.shutdown()

    cpus = TakenCPUs(ray_cluster, 3, wait_until)
    resources = tune.PlacementGroupFactory([{"CPU": 1}, {"CPU": 1}, {"CPU": 1}])
    [result] = fit(
        tune.with_resources(tune_by_hand, resources),
        {"logdir": str(tmp_path / "runs"), "input": 5},
        reuse_actors=False,
        callbacks=[cpus],
    )
    assert result.metrics["output"] == 5
    assert result.metrics["training_iteration"] == 2
    assert cpus.num_seen == 2
    run = load_run(tmp_path / "runs")
    assert run.request["engine"] == "ray"
    assert run.status.state == "SUCCEEDED"


# --- misuse ----------------------------------------------------------------------------------------------------------


def test_started_trainer_is_refused(tmp_path):
    with (
        trainer_for(tmp_path, engine="local") as trainer,
        pytest.raises(TrainerStateError, match=r"shutdown\(\) before"),
    ):
        trainer.to_tune_trainable(training_func)
    assert trainer.to_tune_trainable(training_func).__name__ == "training_func"


def two_arguments(config, more):
    pass


def test_misuse_is_told_at_once(tmp_path):
    trainer = trainer_for(tmp_path)
    with pytest.raises(ArgumentTypeError, match="expected pairs"):
        trainer.to_tune_trainable(training_func, dataset=[1, 2])
    with pytest.raises(ArgumentError, match="2 required parameters"):
        trainer.to_tune_trainable(two_arguments)
    with pytest.raises(ArgumentError, match="num_to_keep=0"):
        trainer.to_tune_trainable(training_func, checkpoint_strategy=CheckpointStrategy(num_to_keep=0))
    with pytest.raises(ArgumentError, match="num_workers=1 or more"):
        trainer_for(tmp_path, num_workers=0).to_tune_trainable(training_func)
    lock = threading.Lock()
    with pytest.raises(ArgumentTypeError, match="cannot be pickled"):
        trainer.to_tune_trainable(lambda: lock)


def test_missing_ray_is_told_with_the_line_that_installs_it(tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.search.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'paceline\[ray\]'"):
        trainer_for(tmp_path).to_tune_trainable(training_func)


def test_elastic_trial_reserves_its_minimum(tmp_path):
    trainable = trainer_for(tmp_path, num_workers=(2, 5), engine="ray").to_tune_trainable(training_func)
    assert trainable.default_resource_request({}).bundles == [{"CPU": 1.0}] * 2
    assert trainable.default_resource_request({}).head_bundle_is_empty
