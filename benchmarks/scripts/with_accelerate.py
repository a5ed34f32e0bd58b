"""Run a job with Accelerate's launcher for processes on the CPU: `python with_accelerate.py SPEC`."""

import json
import sys

from accelerate import debug_launcher

from benchmarks.jobs import Hooks, run_job
from benchmarks.marks import mark


def train(spec):
    run_job(spec, Hooks())


if __name__ == "__main__":
    spec = json.loads(sys.argv[1])
    for _ in range(spec["num_launches"]):
        mark("launch")
        debug_launcher(train, args=(spec,), num_processes=2)
        mark("end")
