"""What is particular to the Ray engine; what it shares with the others is in tests/contract and tests/procs."""

import os
import signal
import threading

import pytest

import paceline
from paceline import BackendConfig, RayEngine, Trainer
from paceline.errors import ResourcesError, WorkerStartError
from paceline.workers.base import Preload, Resources, Size
from paceline.workers.ray_roster import places
from paceline.workers.ray_slots import bundle_of

pytestmark = pytest.mark.usefixtures("ray_cluster")


def free_cpus(ray):
    return ray.available_resources().get("CPU", 0)


@pytest.fixture
def before(ray_cluster, wait_until):
    """The free CPUs, once those of earlier tests have come back."""
    total = ray_cluster.cluster_resources()["CPU"]
    wait_until(lambda: free_cpus(ray_cluster) == total)
    return total


def test_resources_are_exactly_as_asked_and_come_free(ray_cluster, before, wait_until):
    named = ray_cluster.util.list_named_actors(all_namespaces=True)  # Ray Data leaves some of its own
    with Trainer(backend=BackendConfig(), num_workers=2, cpus_per_worker=1.5, engine="ray") as trainer:
        assert trainer.run(paceline.world_rank) == [0, 1]
        wait_until(lambda: free_cpus(ray_cluster) == before - 3)
        actors = ray_cluster.util.list_named_actors(all_namespaces=True)
        assert [actor for actor in actors if actor not in named] == [], "no helper actors"
    wait_until(lambda: free_cpus(ray_cluster) == before)


def test_resources_that_the_cluster_does_not_have_are_an_error_at_once():
    trainer = Trainer(backend=BackendConfig(), num_workers=2, cpus_per_worker=100, engine="ray", logdir="unused")
    with pytest.raises(ResourcesError, match=r"need 200 CPU; the whole cluster has 8 CPU on 1 node"):
        trainer.start()
    with pytest.raises(ResourcesError, match="TPU"):
        Trainer(backend=BackendConfig(), resources_per_worker={"TPU": 1}, engine="ray", logdir="unused").start()


def test_resources_that_others_use_are_waited_for_only_so_long(ray_cluster, before, wait_until):
    with Trainer(backend=BackendConfig(), num_workers=1, cpus_per_worker=before, engine="ray"):
        engine = RayEngine(start_timeout_s=0.5)
        with pytest.raises(ResourcesError, match=r"within 0.5 s. The cluster has 8 CPU, 8 stays; free: . stays\."):
            Trainer(backend=BackendConfig(), num_workers=1, cpus_per_worker=2, engine=engine, logdir="unused").start()
    wait_until(lambda: free_cpus(ray_cluster) == before, "that nothing stays reserved")


def die_once(config):
    """Rank 1 is killed in the first attempt, while rank 0 waits; in the second, all tell their pid."""
    if paceline.load_checkpoint() is None:
        paceline.save_checkpoint(begun=True)
        paceline.load_checkpoint()
        if paceline.world_rank() == 1:
            while not os.path.exists(config["waits"]):
                threading.Event().wait(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        while not paceline.should_stop():
            open(config["waits"], "w").close()
            threading.Event().wait(config["pause_s"])
    return os.getpid()


def test_survivor_keeps_its_process_and_a_spare_takes_the_place_of_the_dead(tmp_path):
    with Trainer(backend=BackendConfig(), num_workers=2, engine=RayEngine(spare_workers=1)) as trainer:
        before = trainer.execute(os.getpid)
        config = {"pause_s": 0.01, "waits": f"{tmp_path}/waits"}
        after = trainer.run(die_once, config)  # which it notices by should_stop()
        assert after[0] == before[0]
        assert after[1] not in before
        assert paceline.load_run(trainer.latest_run_dir).status.state == "SUCCEEDED"


def test_survivor_that_is_stuck_is_replaced_too(tmp_path):
    with Trainer(backend=BackendConfig(), num_workers=2, engine="ray") as trainer:
        before = trainer.execute(os.getpid)
        after = trainer.run(die_once, {"pause_s": None, "waits": f"{tmp_path}/waits"})  # in C code, for ever
        assert set(after).isdisjoint(before)


def depend_on_a_survivor(config):
    """In the first attempt rank 2 is killed while rank 0 waits for a message of rank 1, which has left."""
    import torch  # here, since workers without it import this module too

    if paceline.load_checkpoint() is None:
        paceline.save_checkpoint(begun=True)
        paceline.load_checkpoint()
        if paceline.world_rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if paceline.world_rank() == 0:
            torch.distributed.recv(torch.zeros(1), src=1)
        while not paceline.should_stop():
            threading.Event().wait(0.01)
    return os.getpid()


def test_survivor_that_leaves_frees_those_who_wait_for_it():
    with Trainer(num_workers=3, engine="ray") as trainer:
        before = trainer.execute(os.getpid)
        after = trainer.run(depend_on_a_survivor)
    assert after[:2] == before[:2]
    assert after[2] not in before


def test_worker_that_does_not_take_its_place_is_waited_for_only_so_long(monkeypatch):
    """As at a restart, on a node of which Ray does not know yet that it is lost."""
    group = RayEngine().group(Size(1, 1), Resources(), Preload())
    group.start()
    pid = group.infos[0].pid
    monkeypatch.setattr("paceline.workers.ray_roster._HIRE_S", 0.5)
    group._roster._start_timeout_s = 0.5
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(WorkerStartError, match=rf"1 of 1 workers did not take their place .* process {pid} on"):
            group.start()
        assert not group.infos
    finally:
        os.kill(pid, signal.SIGKILL)
        group.close()


@pytest.mark.parametrize(
    "wrong", [{"placement": "ANY"}, {"start_timeout_s": -1}, {"spare_workers": -1}], ids=lambda wrong: next(iter(wrong))
)
def test_engine_arguments(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        RayEngine(**wrong)


def test_bundle_is_what_was_asked_for():
    assert bundle_of(Resources()) == {"CPU": 1.0}
    assert bundle_of(Resources(cpus=0, gpus=0.5, custom={"TPU": 4})) == {"GPU": 0.5, "TPU": 4}


def test_ranks_are_contiguous_on_each_node_and_see_the_gpus_of_their_node():
    seats = places([("a", ("1",)), ("b", ("0",)), ("a", ("0",)), ("b", ("1",)), ("a", ("2",))])
    ranks = [(place.world_rank, place.local_rank, place.node_rank, place.local_world_size) for place, _ in seats]
    assert ranks == [(0, 0, 0, 3), (3, 0, 1, 2), (1, 1, 0, 3), (4, 1, 1, 2), (2, 2, 0, 3)]
    assert [visible for _, visible in seats] == [("0", "1", "2"), ("0", "1")] * 2 + [("0", "1", "2")]
    assert [place.device_index for place, _ in seats] == [1, 0, 0, 1, 2]
    assert {place.world_size for place, _ in seats} == {5}
