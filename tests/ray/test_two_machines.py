"""A group over two machines, that is two addresses and two sets of processes that share nothing but files."""

import json
import sys

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


@pytest.fixture(scope="module")
def story():
    """What the program tells, on the first machine, while the second is there and when it is not any more."""
    with two_machines() as (first, second):
        said, told = "", []
        for line in first.start([sys.executable, "-c", PROGRAM]).stdout:
            said += line
            told += [json.loads(line)] if line.startswith("{") else []
            if len(told) == 3:
                second.power_off()
    assert len(told) == 4, said
    return told


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
