"""What test_nodes.py runs in a process of its own: raylets on this machine, and runs in which they die, come and are
drained.

The last line that it prints is what happened, as JSON.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path

import ray
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2

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


def count(config):
    """Step by step, until somebody says that it is enough; a stop that is asked for in between is obeyed."""
    step = (paceline.load_checkpoint() or {"step": 0})["step"]
    while not Path(config["enough"]).exists():
        step += 1
        paceline.report(step=step, size=paceline.world_size(), node=ray.get_runtime_context().get_node_id())
        paceline.save_checkpoint(step=step)
        if paceline.should_stop():
            break
        threading.Event().wait(0.02)
    return paceline.world_rank(), paceline.world_size(), step


class Fate(SGDCallback):
    """Moves the cluster on, from one act to the next, when the group has had the expected size for some steps."""

    def __init__(self, acts):
        self.acts, self.num_steps, self.resizes, self.restarts = acts, 0, [], []
        self.last_nodes = []

    def handle_result(self, results, **info):
        self.last_nodes = [report["node"] for report in results]
        size, act = self.acts[0] if self.acts else (0, None)
        self.num_steps = self.num_steps + 1 if len(results) == size else 0
        if self.num_steps == 5:
            self.acts.pop(0)
            self.num_steps = 0
            act()

    def handle_resize(self, world_size, **info):
        self.resizes.append([info["former"], world_size])

    def handle_restart(self, attempt, reason, **info):
        self.restarts.append([info["cause"], reason])


def main(enough):
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    for _ in range(2):
        cluster.add_node(num_cpus=2, wait=False)
    cluster.wait_for_nodes()
    ray.init(cluster.address, log_to_driver=False)
    answer = {"fixed": run_fixed(cluster), "elastic": run_elastic(cluster, enough)}
    ray.shutdown()
    cluster.shutdown()
    print(json.dumps(answer))


def run_fixed(cluster):
    """Groups of one size, on three nodes. In the end only that of this program is left."""
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
    return answer


def run_elastic(cluster, enough):
    """A group that follows the cluster; each of its workers takes what this program's node has."""
    nodes = [cluster.add_node(num_cpus=2)]

    def lose_a_node():
        cluster.remove_node(nodes.pop(), allow_graceful=False)

    def add_a_node():
        nodes.append(cluster.add_node(num_cpus=4))

    def drain_a_node():
        soon_ms = int(time.time() * 1000) + 60_000
        reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        ray._raylet.GcsClient(address=cluster.address).drain_node(nodes[-1].node_id, reason, "test", soon_ms)

    fate = Fate([(2, lose_a_node), (1, add_a_node), (3, drain_a_node), (1, Path(enough).touch)])
    trainer = Trainer(
        backend=BackendConfig(),
        num_workers=(1, float("inf")),
        cpus_per_worker=2,
        engine=RayEngine(start_timeout_s=30),
        replacement_timeout_s=1,
        max_retries=1,
    )
    with trainer:
        values = trainer.run(count, {"enough": enough}, callbacks=[fate])
        run = paceline.load_run(trainer.latest_run_dir)
    return {
        "values": values,
        "resizes": fate.resizes,
        "restarts": fate.restarts,
        "events": [event["kind"] for event in run.events],
        "steps": run.metrics[run.metrics["rank"] == 0]["step"].tolist(),
        "drained": nodes[-1].node_id,
        "last_nodes": fate.last_nodes,
        "state": run.status.state,
    }


def _other_than_ours(workers):
    """The last node of a group on which this program is not."""
    ours = ray.get_runtime_context().get_node_id()
    return [worker["node"] for worker in workers if worker["node"] != ours][-1]


if __name__ == "__main__":
    main(sys.argv[1])
