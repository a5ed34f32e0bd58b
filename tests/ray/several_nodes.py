"""What test_nodes.py runs in a process of its own: three raylets on this machine, and runs in which two of them die.

The last line that it prints is what happened, as JSON.
"""

import json
import os
import threading

import ray
from lean_nodes import lean_nodes
from ray.cluster_utils import Cluster

import paceline
from paceline import BackendConfig, RayEngine, SGDCallback, Trainer
from paceline.errors import PacelineError


def where_am_i():
    return {
        "rank": paceline.world_rank(),
        "local_rank": paceline.local_rank(),
        "node_rank": paceline.node_rank(),
        "local_world_size": paceline.local_world_size(),
        "node": ray.get_runtime_context().get_node_id(),
        "pid": os.getpid(),
    }


def add_up():
    """Where everybody is, and what the ranks of the torch group add up to."""
    import torch
    import torch.distributed as dist

    total = torch.tensor([float(paceline.world_rank())])
    dist.all_reduce(total)
    return {**where_am_i(), "total": total.item(), "master": os.environ["MASTER_ADDR"]}


def count_to_six(wait, answer):
    """Save at 3, and wait there until a node is gone: only a second attempt goes on."""
    resumed = paceline.load_checkpoint()
    for at in range(resumed["at"] if resumed else 0, 6):
        paceline.report(at=at + 1)
        if at + 1 == 3:
            paceline.save_checkpoint(at=3)
            wait()
    return answer()


def wait_in_collectives():
    import torch.distributed as dist

    while True:
        dist.barrier()


def wait_for_stop():
    while not paceline.should_stop():
        threading.Event().wait(0.01)


class NodeKiller(SGDCallback):
    """Kills a node, without notice, once there is a checkpoint to go on from. Keeps the steps that it is told of."""

    def __init__(self, cluster, node_id):
        self.cluster, self.node_id, self.steps, self.reasons = cluster, node_id, [], []

    def handle_result(self, results, **info):
        self.steps.append([report["at"] for report in results])

    def handle_checkpoint(self, checkpoint, **info):
        node = next((one for one in self.cluster.worker_nodes if one.node_id == self.node_id), None)
        if node is not None:
            self.cluster.remove_node(node, allow_graceful=False)

    def handle_restart(self, attempt, reason, **info):
        self.reasons.append(reason)


def main():
    lean_nodes()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    for _ in range(2):
        cluster.add_node(num_cpus=2, wait=False)
    cluster.wait_for_nodes()
    ray.init(cluster.address, log_to_driver=False)
    answer = {"addresses": {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}}

    with Trainer(backend="torch", num_workers=3, engine=RayEngine(placement="SPREAD")) as trainer:
        answer["spread"] = trainer.run(add_up)
        killer = NodeKiller(cluster, _other_than_ours(answer["spread"]))
        answer["spread_again"] = trainer.run(lambda: count_to_six(wait_in_collectives, add_up), callbacks=[killer])
        answer["killed"], answer["steps"], answer["reasons"] = killer.node_id, killer.steps, killer.reasons

    with Trainer(backend=BackendConfig(), num_workers=4, engine=RayEngine(start_timeout_s=2)) as trainer:
        answer["packed"] = trainer.run(where_am_i)
        killer = NodeKiller(cluster, _other_than_ours(answer["packed"]))
        try:
            trainer.run(lambda: count_to_six(wait_for_stop, where_am_i), callbacks=[killer])
        except PacelineError as error:
            answer["no_room"] = f"{type(error).__name__}: {error}"
        answer["state"] = paceline.load_run(trainer.latest_run_dir).status.state

    answer["alive"] = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    ray.shutdown()
    cluster.shutdown()
    print(json.dumps(answer))


def _other_than_ours(workers):
    """The last node of a group on which this program is not."""
    ours = ray.get_runtime_context().get_node_id()
    return [worker["node"] for worker in workers if worker["node"] != ours][-1]


if __name__ == "__main__":
    main()
