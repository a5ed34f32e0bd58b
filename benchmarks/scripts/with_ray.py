"""Run a job with Ray Train, on a Ray that lives and ends with this script: `python with_ray.py SPEC`."""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

import ray
import ray.train
import torch
from ray.train.torch import TorchTrainer
from ray.train.v2.api.callback import UserCallback

from benchmarks.jobs import Hooks, run_job
from benchmarks.local_ray import local_ray
from benchmarks.marks import MARKS_FILE, mark


class CountReports(UserCallback):
    """Counts what reaches the controller; its process outlives no run, so every report is a mark."""

    count = 0

    def after_report(self, run_context, metrics, checkpoint):
        self.count += len(metrics)
        mark("delivered", count=self.count, last=time.monotonic())


def train(spec):
    run_job(spec, Hooks(ray.train.report, save, load))


def save(state):
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if ray.train.get_context().get_world_rank() == 0:
            torch.save(state, Path(folder) / "model.pt")
            checkpoint = ray.train.Checkpoint.from_directory(folder)
        ray.train.report({"saved": 1}, checkpoint=checkpoint)
    ray.train.report({"saved": 2})  # the controller takes one at a time: it has the first one now


def load():
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as folder:
        return torch.load(Path(folder) / "model.pt")


def main(spec, scratch):
    for _ in range(spec["num_launches"]):
        mark("launch")
        TorchTrainer(
            train,
            train_loop_config=spec,
            scaling_config=ray.train.ScalingConfig(num_workers=2),
            run_config=ray.train.RunConfig(
                storage_path=str(scratch),
                failure_config=ray.train.FailureConfig(max_failures=3),
                callbacks=[CountReports()] if spec.get("count") else None,
            ),
        ).fit()
        mark("end")


if __name__ == "__main__":
    spec = json.loads(sys.argv[1])
    with local_ray(spec.get("num_cpus", 2)):
        main(spec, Path(os.environ[MARKS_FILE]).parent / "ray_results")
