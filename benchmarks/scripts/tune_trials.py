"""Run a job as trials of Ray Tune, two at a time: `python tune_trials.py SPEC paceline|ray_train`."""

import json
import os
import sys
from pathlib import Path

import ray.train
from ray import tune
from ray.train.torch import TorchTrainer
from ray.tune.integration.ray_train import TuneReportCallback

import paceline
from benchmarks.local_ray import local_ray
from benchmarks.marks import MARKS_FILE, mark
from benchmarks.scripts import with_paceline, with_ray

SCRATCH = str(Path(os.environ[MARKS_FILE]).parent / "ray_results")
NUM_AT_A_TIME = 2
NUM_CPUS = NUM_AT_A_TIME * 3
"""Each trial has two workers, and with Ray Train a function besides that drives them."""


def paceline_trainable():
    return paceline.Trainer(backend="torch", num_workers=2, engine="ray").to_tune_trainable(with_paceline.train)


def ray_train_trainable():
    return tune.with_resources(drive_ray_train, {"CPU": 1})


def drive_ray_train(spec):
    TorchTrainer(
        with_ray.train,
        train_loop_config=spec,
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(storage_path=SCRATCH, callbacks=[TuneReportCallback()]),
    ).fit()


TRAINABLES = {"paceline": paceline_trainable, "ray_train": ray_train_trainable}


def main(spec, system):
    tuner = tune.Tuner(
        TRAINABLES[system](),
        param_space=spec,
        tune_config=tune.TuneConfig(
            num_samples=spec["num_trials"], max_concurrent_trials=NUM_AT_A_TIME, reuse_actors=True
        ),
        run_config=tune.RunConfig(storage_path=SCRATCH, verbose=0),
    )
    mark("launch")
    results = tuner.fit()
    mark("end")
    finished = [result for result in results if result.error is None and "loss" in result.metrics]
    if len(finished) != spec["num_trials"]:
        raise RuntimeError(f"{len(finished)} of {spec['num_trials']} trials finished; {results.errors}")


if __name__ == "__main__":
    with local_ray(NUM_CPUS):
        main(json.loads(sys.argv[1]), sys.argv[2])
