"""What test_elastic_nodes.py runs in a process of its own: a run on a cluster whose nodes come and go.

The last line that it prints is what happened, as JSON.
"""

import json
import sys
import threading
import time
from pathlib import Path

import ray
from lean_nodes import lean_nodes
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2

import paceline
from paceline import BackendConfig, RayEngine, SGDCallback, Trainer


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
    lean_nodes()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    nodes = [cluster.add_node(num_cpus=1)]
    ray.init(cluster.address, log_to_driver=False)

    def lose_a_node():
        cluster.remove_node(nodes.pop(), allow_graceful=False)

    def add_a_node():
        nodes.append(cluster.add_node(num_cpus=2))

    def drain_a_node():
        soon_ms = int(time.time() * 1000) + 60_000
        reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        ray._raylet.GcsClient(address=cluster.address).drain_node(nodes[-1].node_id, reason, "test", soon_ms)

    fate = Fate([(2, lose_a_node), (1, add_a_node), (3, drain_a_node), (1, Path(enough).touch)])
    trainer = Trainer(
        backend=BackendConfig(),
        num_workers=(1, float("inf")),
        engine=RayEngine(start_timeout_s=30),
        replacement_timeout_s=1,
        max_retries=1,
    )
    with trainer:
        values = trainer.run(count, {"enough": enough}, callbacks=[fate])
        run = paceline.load_run(trainer.latest_run_dir)
    answer = {
        "values": values,
        "resizes": fate.resizes,
        "restarts": fate.restarts,
        "events": [event["kind"] for event in run.events],
        "steps": run.metrics[run.metrics["rank"] == 0]["step"].tolist(),
        "drained": nodes[-1].node_id,
        "last_nodes": fate.last_nodes,
        "state": run.status.state,
    }
    ray.shutdown()
    cluster.shutdown()
    print(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1])
