"""What is particular to workers that train with jax; the suites for backends have the rest."""

import os
import signal

import jax
import pytest

import paceline
from paceline import BackendConfig, JaxConfig, SGDCallback, Trainer
from paceline.backends.jax_links import listening
from paceline.errors import CheckpointValueError


@pytest.fixture(scope="module")
def warm(lasts):
    with Trainer(JaxConfig(num_cpu_devices=2), 2, engine="local", logdir="jax") as trainer, lasts(trainer):
        yield trainer


def shared(values, *axes):
    """An array over the devices of all processes, of which each has the same or, by the axis "all", its own part."""
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    sharding = NamedSharding(Mesh(jax.devices(), ("all",)), PartitionSpec(*axes))
    return jax.make_array_from_process_local_data(sharding, values)


def test_devices_of_all_workers_are_one_mesh(warm):
    def add():
        import numpy as np

        own = np.arange(2.0, dtype="f4") + 10 * paceline.world_rank()
        return jax.local_device_count(), jax.device_count(), shared(own, "all").sum().item()

    assert warm.run(add) == [(2, 4, 22.0)] * 2


def test_nobody_else_can_reach_the_group(warm):
    def listen():
        shared(jax.numpy.ones(2), "all").sum().item()
        return {address for address, _ in listening()}

    assert warm.run(listen) == [{"127.0.0.1"}] * 2


def test_array_that_all_processes_have_is_saved_as_it_is_and_one_in_parts_is_refused(warm):
    def save():
        import numpy as np

        whole, parts = shared(np.arange(3.0)), shared(np.ones(2), "all")
        paceline.report(whole=whole, scalar=whole.sum())
        paceline.save_checkpoint(whole=whole, per_rank={"parts": [one.data for one in parts.addressable_shards]})
        back = paceline.load_checkpoint()
        return (back["whole"] + parts.sum()).tolist(), len(back.per_rank["parts"])

    assert warm.run(save) == [([4.0, 5.0, 6.0], 2)] * 2
    assert paceline.load_run(warm.latest_run_dir).metrics["scalar"].tolist() == [3.0, 3.0]
    with pytest.raises(CheckpointValueError, match=r"'parts' is a .*: each process has only a part of it: save "):
        warm.run(lambda: paceline.save_checkpoint(parts=shared(jax.numpy.ones(2), "all")))


def test_script_that_initialises_jax_itself_runs_unchanged(warm):
    def script():
        jax.distributed.initialize()
        return jax.process_index(), jax.process_count()

    assert warm.run(script) == [(0, 2), (1, 2)]


def test_settings_of_the_driver_count(warm):
    def look():
        return str(jax.numpy.ones(1).dtype)

    jax.config.update("jax_enable_x64", True)
    try:
        assert warm.run(look) == ["float64"] * 2
    finally:
        jax.config.update("jax_enable_x64", False)
    assert warm.run(look) == ["float32"] * 2


class Reasons(SGDCallback):
    def __init__(self):
        self.reasons = []

    def handle_restart(self, attempt, reason, **info):
        self.reasons.append(reason)


def test_rank_that_was_killed_is_named_and_not_those_whom_jax_ends_for_it(warm, tmp_path):
    """Rank 0 has the service: when it goes away, jax ends all other processes."""

    def die_once():
        total = shared(jax.numpy.ones(2), "all").sum().item()
        if paceline.world_rank() == 0 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return shared(jax.numpy.ones(2), "all").sum().item() + total

    marker, reasons = tmp_path / "killed", Reasons()
    assert warm.run(die_once, callbacks=[reasons]) == [8.0, 8.0]
    [reason] = reasons.reasons
    assert reason.startswith("rank 0 was killed by SIGKILL")
    assert "rank 1" not in reason


def test_worker_that_is_told_to_leave_may_save_first(warm):
    """jax itself would take SIGTERM for its own."""

    def save_and_leave():
        if (checkpoint := paceline.load_checkpoint()) is not None:
            return checkpoint["x"].item()
        if paceline.world_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        while not paceline.should_stop():
            pass
        paceline.save_checkpoint(x=jax.numpy.float32(5))
        return None

    assert warm.run(save_and_leave) == [5.0, 5.0]


def test_in_this_process():
    initialize = jax.distributed.initialize

    def train():
        jax.distributed.initialize()
        paceline.save_checkpoint(x=jax.numpy.arange(3))
        return jax.process_count(), paceline.load_checkpoint()["x"].tolist()

    with Trainer("jax", 0) as trainer:
        assert trainer.run(train) == [(1, [0, 1, 2])]
        assert trainer.run(train) == [(1, [0, 1, 2])]
    assert jax.distributed.initialize is initialize


def test_in_this_process_with_devices_of_its_own(tmp_path):
    """jax makes them once in a process: here, in a new one."""

    def train():
        with Trainer(JaxConfig(num_cpu_devices=2), 0, logdir=tmp_path / "inner") as trainer:
            return trainer.run(lambda: jax.device_count())

    with Trainer(BackendConfig(), 1, engine="local", logdir=tmp_path / "outer") as trainer:
        assert trainer.run(train) == [[2]]


def test_two_in_this_process_leave_it_as_it_was_whichever_ends_first(tmp_path):
    initialize = jax.distributed.initialize
    trainers = [Trainer("jax", 0, logdir=tmp_path) for _ in range(2)]
    for trainer in trainers:
        trainer.start()
    for trainer in trainers:
        trainer.shutdown()
    assert jax.distributed.initialize is initialize
