"""Time the driver's loop against workers that are only scripts: `python control_scripted.py SPEC`."""

import json
import sys
import time

import paceline
from benchmarks.marks import mark
from paceline.testing import ScriptedEngine, reports, returns


class TimeSteps(paceline.SGDCallback):
    """CPU time of this process between the first step and the last."""

    def start_training(self, logdir, config, **info):
        self.times = []

    def handle_result(self, results, **info):
        self.times.append(time.process_time())

    @property
    def per_step_s(self):
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1)


def per_step_s(count, num_steps):
    script = [*reports(num_steps, loss=0.5, accuracy=0.9), returns()]
    engine = ScriptedEngine([[script] * count])
    timer = TimeSteps()
    with paceline.Trainer(backend=paceline.BackendConfig(), num_workers=count, engine=engine) as trainer:
        trainer.run(lambda: None, callbacks=[timer])
    return timer.per_step_s


if __name__ == "__main__":
    spec = json.loads(sys.argv[1])
    per_step_s(1, spec["num_steps"])  # imports, and whatever else is done once
    for _ in range(spec["num_rounds"]):
        for count in spec["counts"]:
            mark("step", count=count, seconds=per_step_s(count, spec["num_steps"]))
