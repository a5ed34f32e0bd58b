"""Groups over two machines, that is two addresses and two sets of processes: while the second does not see the first's
disk, so that checkpoints travel through Ray, and arrive whole; and when it falls silent."""

import json
import sys
from pathlib import Path

import pytest
from two_machines import ADDRESSES, two_machines

PROGRAM = """
import json, os, socket
import ray
import torch
import torch.distributed as dist
import paceline
from paceline import RayEngine, SGDCallback, Trainer
from paceline.errors import PacelineError

class Listener(SGDCallback):
    hosts = []

    def handle_result(self, results, **info):
        self.hosts += [report["host"] for report in results]

    def handle_checkpoint(self, checkpoint, **info):
        print(json.dumps({"saved": paceline.read_checkpoint(checkpoint.path)["total"].tolist()}), flush=True)

def meet():
    total = torch.tensor([1.0 + paceline.world_rank()])
    dist.all_reduce(total)
    paceline.report(host=socket.gethostname())
    paceline.save_checkpoint(total=total)
    print("hello from", socket.gethostname())
    facts = {name: getattr(paceline, name)() for name in ("local_rank", "node_rank", "local_world_size")}
    address = ray.util.get_node_ip_address()
    return {**facts, "total": total.item(), "address": address, "master": os.environ["MASTER_ADDR"]}

def meet_for_ever():
    meet()
    while True:
        dist.barrier()

with Trainer(num_workers=2, engine=RayEngine(start_timeout_s=2)) as trainer:
    workers = trainer.run(meet, callbacks=[Listener()])
    logs = [(trainer.latest_run_dir / "logs" / f"rank_{rank}.log").read_text() for rank in range(2)]
    print(json.dumps({"workers": workers, "hosts": Listener.hosts, "logs": logs}), flush=True)
    try:
        trainer.run(meet_for_ever, callbacks=[Listener()])
    except PacelineError as error:
        events = (trainer.latest_run_dir / "events.jsonl").read_text().splitlines()
        died = [event["reason"] for event in map(json.loads, events) if event["kind"] == "worker_died"]
        print(json.dumps({"error": f"{type(error).__name__}: {error}", "died": died}))
"""


NAMES = (
    "look", "killed", "killed_large", "given", "given_in_memory", "files", "files_again", "full", "refused", "failed",
    "both",
)  # fmt: skip


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    """Both machines, and a folder for results on the second that the first does not see."""
    results = tmp_path_factory.mktemp("hidden")
    with two_machines(hidden=[results]) as (first, second):
        yield first, second, results


@pytest.fixture(scope="module")
def hidden(machines):
    """What no_shared_storage.py tells of each of its runs. It is on the machine whose results nobody else sees."""
    _, second, results = machines
    said = second.run([sys.executable, Path(__file__).with_name("no_shared_storage.py"), results])
    lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    return dict(zip(NAMES, lines, strict=True))


@pytest.fixture(scope="module")
def story(machines, hidden):
    """What the program tells, on the first machine, while the second is there and when it is not any more: after all
    that needs both."""
    first, second, _ = machines
    said, told = "", []
    for line in first.start([sys.executable, "-c", PROGRAM]).stdout:
        said += line
        told += [json.loads(line)] if line.startswith("{") else []
        if len(told) == 3:
            second.power_off()
    assert len(told) == 4, said
    return told


def test_workers_are_elsewhere_and_see_nothing(hidden):
    assert hidden["look"]["values"] == [{"host": "machine-1", "sees": False}] * 2


def test_worker_is_killed_and_all_go_on_from_rank_0s_checkpoint(hidden):
    on_far = {"begin": 2, "step": 4, "mean": 4.0, "on": "machine-1"}
    for name in ("killed", "killed_large"):
        assert hidden[name]["values"] == [on_far] * 2
    assert hidden["killed_large"]["on_disk"] == {"1": 1, "2": 2, "3": 3, "4": 4}


def test_old_checkpoints_are_deleted_on_the_drivers_disk(hidden):
    assert hidden["killed"]["on_disk"] == {"4": 4}, "what ranks resumed from is spared only while the run lasts"


def test_checkpoint_that_was_given_to_the_run(hidden):
    assert hidden["given"]["values"] == hidden["given_in_memory"]["values"] == [4, 4]


def test_users_files_travel_both_ways(hidden):
    mine = {"deep/notes.txt": "of rank 0", "empty": ""}
    assert hidden["files"]["values"] == [[None, mine]] * 2
    assert hidden["files_again"]["values"] == [[mine, mine]] * 2
    assert hidden["files_again"]["read"] == mine


def test_disk_full_on_the_drivers_machine(hidden):
    said, step = hidden["full"]["values"][0]
    assert "checkpoint_000002 could not be written after 3 attempts: [Errno 28] No space left on device" in said
    assert "Free space there: " in said
    assert step == 3
    assert hidden["full"]["on_disk"] == {"1": 1, "3": 3}


def test_folder_refuses_on_the_drivers_machine(hidden):
    assert hidden["refused"]["error"].startswith("CheckpointWriteError: The checkpoint ")
    assert "Not a directory" in hidden["refused"]["error"]


def test_checkpoint_on_its_way_arrives_before_a_failed_run_ends(hidden):
    assert hidden["failed"]["error"].startswith("KeyError")
    assert hidden["failed"]["on_disk"] == {"1": 1, "2": 2}


def test_one_rank_sees_the_folder_and_the_other_does_not(hidden):
    values = hidden["both"]["values"]
    assert sorted(value.pop("on") for value in values) == ["machine-1", "machine-2"]
    assert values == [{"begin": 2, "step": 4, "mean": 4.0}] * 2
    assert hidden["both"]["on_disk"] == {"1": 1, "2": 2, "3": 3, "4": 4}


def test_nothing_else_is_left_in_the_folders(hidden):
    assert [run["left"] for run in hidden.values()] == [[]] * len(hidden)


def test_ranks_on_two_addresses_are_one_group(story):
    workers = story[1]["workers"]
    assert {worker["address"] for worker in workers} == set(ADDRESSES)
    assert [worker["node_rank"] for worker in workers] == [0, 1]
    assert {(worker["local_rank"], worker["local_world_size"]) for worker in workers} == {(0, 1)}
    assert {worker["total"] for worker in workers} == {3.0}
    assert {worker["master"] for worker in workers} == {workers[0]["address"]}


def test_reports_logs_and_checkpoint_of_both_machines_arrive(story):
    assert story[0] == {"saved": [3.0]}
    hosts = story[1]["hosts"]
    assert sorted(hosts) == ["machine-1", "machine-2"]
    assert story[1]["logs"] == [f"hello from {host}\n" for host in hosts]


def test_machine_falls_silent_and_there_is_no_other(story):
    assert story[3]["error"].startswith("ResourcesError: 2 workers with 1 CPU each could not be placed within 2 s.")
    assert "was lost with its node" in story[3]["died"]
