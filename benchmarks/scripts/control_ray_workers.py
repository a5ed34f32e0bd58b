"""Time the driver while workers on Ray do nothing but report: `python control_ray_workers.py SPEC`."""

import json
import sys
import time

import paceline
from benchmarks.local_ray import local_ray
from benchmarks.marks import mark

CPUS_PER_WORKER = 0.1
START_TIMEOUT_S = 600


def only_report(config):
    for step in range(config["num_steps"]):
        if config["pause_s"]:  # sleeping for no time would still give the core away
            time.sleep(config["pause_s"])
        if config["reports"]:
            paceline.report(step=step, loss=0.5, accuracy=0.9)


class CountSteps(paceline.SGDCallback):
    def start_training(self, logdir, config, **info):
        self.count = 0

    def handle_result(self, results, **info):
        self.count += 1


def cpu_s(trainer, **config):
    """CPU time of this process, with all its threads, during one run."""
    counter = CountSteps()
    begin = time.process_time()
    trainer.run(only_report, config, callbacks=[counter])
    spent_s = time.process_time() - begin
    num_expected = config["num_steps"] if config["reports"] else 0
    assert counter.count == num_expected, f"{counter.count} of {num_expected} steps arrived"
    return spent_s


def time_steps(count, paces, num_rounds):
    """What a run takes that is as long and reports nothing does not count: it is Ray's own, and that of any run."""
    engine = paceline.RayEngine(start_timeout_s=START_TIMEOUT_S)
    with paceline.Trainer(
        backend=paceline.BackendConfig(), num_workers=count, cpus_per_worker=CPUS_PER_WORKER, engine=engine
    ) as trainer:
        cpu_s(trainer, num_steps=1, pause_s=0, reports=True)  # imports, and whatever else is done once
        for name, pace in [*paces.items()] * num_rounds:
            silent_s, spent_s = cpu_s(trainer, **pace, reports=False), cpu_s(trainer, **pace, reports=True)
            mark(name, count=count, seconds=(spent_s - silent_s) / pace["num_steps"])


if __name__ == "__main__":
    spec = json.loads(sys.argv[1])
    with local_ray(int(max(spec["counts"]) * CPUS_PER_WORKER) + 1):
        for count in spec["counts"]:
            time_steps(count, spec["paces"], spec["num_rounds"])
