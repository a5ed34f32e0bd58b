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


def main(spec, engine="local"):
    """A launch is one run; its workers belong to it unless the spec says `keep_group`."""
    if spec.get("keep_group"):
        with group(engine) as trainer:
            for _ in range(spec["num_launches"]):
                time.sleep(spec.get("rest_s", 0))
                mark("launch")
                run(trainer, spec)
                mark("end")
        return
    for _ in range(spec["num_launches"]):
        mark("launch")
        with group(engine) as trainer:
            run(trainer, spec)
        mark("end")


def group(engine):
    return paceline.Trainer(backend="torch", num_workers=2, engine=engine)


def run(trainer, spec):
    trainer.run(train, spec, callbacks=[CountReports()] if spec.get("count") else None)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
