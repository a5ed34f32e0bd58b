"""Run a job with Lightning Fabric: `python with_fabric.py SPEC ddp_spawn`."""

import json
import sys

from lightning.fabric import Fabric

from benchmarks.jobs import Hooks, run_job
from benchmarks.marks import mark


def train(fabric, spec):
    run_job(spec, Hooks())


if __name__ == "__main__":
    spec, strategy = json.loads(sys.argv[1]), sys.argv[2]
    for _ in range(spec["num_launches"]):
        mark("launch")
        Fabric(accelerator="cpu", devices=2, strategy=strategy).launch(train, spec)
        mark("end")
