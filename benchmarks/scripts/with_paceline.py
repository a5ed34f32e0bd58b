"""Run a job with Paceline: `python with_paceline.py SPEC`."""

import json
import sys
import time

import torch.distributed  # noqa: F401 -- as at the top of any training script

import paceline
from benchmarks.jobs import Hooks, run_job
from benchmarks.marks import mark


class CountReports(paceline.SGDCallback):
    """Counts what reaches the driver, and when the last of it did."""

    def start_training(self, logdir, config, **info):
        self.count, self.last = 0, 0.0

    def handle_result(self, results, **info):
        self.count += len(results)
        self.last = time.monotonic()

    def finish_training(self, error=False, **info):
        mark("delivered", count=self.count, last=self.last)


def train(spec):
    run_job(spec, Hooks(lambda metrics: paceline.report(**metrics), save, load))


def save(state):
    paceline.save_checkpoint(model=state)
    paceline.load_checkpoint()  # waits until it is committed


def load():
    checkpoint = paceline.load_checkpoint()
    return checkpoint and checkpoint["model"]


def launch(trainer, spec):
    counter = CountReports()
    trainer.run(train, spec, callbacks=[counter] if spec.get("count") else None)
    mark("end")


def main(spec):
    if spec.get("keep_group"):
        with paceline.Trainer(backend="torch", num_workers=2) as trainer:
            for _ in range(spec["num_launches"]):
                mark("launch")
                launch(trainer, spec)
        return
    for _ in range(spec["num_launches"]):
        mark("launch")
        with paceline.Trainer(backend="torch", num_workers=2) as trainer:
            launch(trainer, spec)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
