"""One suite for every backend whose framework is here: the same training, and whatever happens to it, ends the same."""

import os
import signal
import sys
import threading

import numpy as np
import pytest
from probing import fitted, installed_backends, probe_of

import paceline
from paceline import LocalEngine, SGDCallback, Trainer

NUM_STEPS = 6


@pytest.fixture(scope="module", params=[name for name in installed_backends() if probe_of(name).train])
def probe(request):
    return probe_of(request.param)


@pytest.fixture(scope="module")
def warm(probe, lasts):
    """Two workers that the tests of a backend share."""
    name = probe.config().name
    with (
        Trainer(probe.config(), 2, engine="local", logdir=f"train_{name}", hang_timeout_s=60) as trainer,
        lasts(trainer),
    ):
        yield trainer


@pytest.fixture(scope="module")
def undisturbed(warm, probe):
    """What the weights become when nothing happens."""
    return warm.run(probe.train, nothing_happens())


def nothing_happens():
    return {"steps": NUM_STEPS, "hook": lambda step: None}


def once(act, step, marker, rank=1):
    """At this step one rank does something, if nobody has done it before. A checkpoint counts by then: whoever loads
    one waits for those that it has made."""

    def hook(now):
        if now == step and paceline.world_rank() == rank and not os.path.exists(marker):
            paceline.load_checkpoint()
            with open(marker, "w"):
                act()

    return {"steps": NUM_STEPS, "hook": hook}


def kill_this():
    os.kill(os.getpid(), signal.SIGKILL)


def steps_of(trainer, rank=0):
    frame = paceline.load_run(trainer.latest_run_dir).metrics
    return frame[frame["rank"] == rank]


def assert_every_step_counts_once(trainer):
    for rank in range(2):
        assert steps_of(trainer, rank)["step"].tolist() == list(range(1, NUM_STEPS + 1))


def test_same_numbers_as_one_process_by_hand(warm, probe, undisturbed):
    weights = warm.run(probe.train, nothing_happens())
    losses, expected = fitted(NUM_STEPS)
    assert weights[0] == weights[1]
    np.testing.assert_allclose(weights[0], expected, rtol=1e-5)
    assert weights == undisturbed, "a second run of the same workers is the same"
    for rank in range(2):
        np.testing.assert_allclose(steps_of(warm, rank)["loss"], losses, rtol=1e-5)


def test_killed_worker_changes_nothing(warm, probe, undisturbed, tmp_path):
    assert warm.run(probe.train, once(kill_this, 3, tmp_path / "killed")) == undisturbed
    assert (tmp_path / "killed").exists()
    assert_every_step_counts_once(warm)


def test_error_of_one_rank_is_raised_as_it_is_and_leaves_good_workers(warm, probe, undisturbed, tmp_path):
    def fail():
        raise ZeroDivisionError("by rank 1")

    with pytest.raises(ZeroDivisionError, match="by rank 1"):
        warm.run(probe.train, once(fail, 3, tmp_path / "failed"))
    assert warm.run(probe.train, nothing_happens()) == undisturbed


def test_rank_that_hangs_is_replaced(probe, undisturbed, tmp_path):
    hang = once(lambda: threading.Event().wait(), 3, tmp_path / "hung")
    with Trainer(
        probe.config(), 2, engine="local", hang_timeout_s=5, max_retries=-1, logdir=tmp_path / "runs"
    ) as trainer:
        assert trainer.run(probe.train, hang) == undisturbed
        assert_every_step_counts_once(trainer)


class TakeAway(SGDCallback):
    """At a step, the machine has room for one worker only, and the other is gone."""

    def __init__(self, engine, step):
        self.engine, self.step, self.trainer, self.sizes = engine, step, None, []

    def handle_result(self, results, **info):
        self.sizes.append(len(results))
        if results[0]["step"] == self.step and self.engine.slots == 2:
            self.engine.slots = 1
            os.kill(self.trainer._crew.group.infos[1].pid, signal.SIGKILL)


def test_group_that_shrinks_goes_on_to_the_same_end(probe, tmp_path):
    def wait_for_the_end(step):
        if step == 3 and paceline.world_size() == 2:
            paceline.load_checkpoint()
            threading.Event().wait()

    engine = LocalEngine(slots=2)
    callback = TakeAway(engine, step=3)
    with Trainer(probe.config(), (1, 2), engine=engine, logdir=tmp_path) as callback.trainer:
        [weights] = callback.trainer.run(
            probe.train, {"steps": NUM_STEPS, "hook": wait_for_the_end}, callbacks=[callback]
        )
    assert callback.sizes == [2, 2, 2, 1, 1, 1]
    np.testing.assert_allclose(weights, fitted(NUM_STEPS)[1], rtol=1e-5)


@pytest.mark.parametrize("engine", ["ray"])
def test_killed_worker_on_ray_changes_nothing(engine, imported_on_ray, probe, tmp_path):
    """Its workers are forked with the framework imported. What a new one has to import before that, it does as well."""
    config = probe.config()

    def train_and_look(options):
        return probe.train(options), {*config.preload.to_join} - sys.modules.keys()

    resources = {"cpus_per_worker": 0.5, "engine": engine, "logdir": tmp_path / "runs"}
    with imported_on_ray(config.package), Trainer(config, 2, **resources) as trainer:
        before, missing = zip(*trainer.run(train_and_look, nothing_happens()), strict=True)
        assert missing == (set(), set())
        assert trainer.run(probe.train, once(kill_this, 3, tmp_path / "killed")) == [*before]
        assert (tmp_path / "killed").exists()
        assert_every_step_counts_once(trainer)
    np.testing.assert_allclose(before[0], fitted(NUM_STEPS)[1], rtol=1e-5)
