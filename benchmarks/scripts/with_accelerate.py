"""Run a job with one of Accelerate's launchers: `python with_accelerate.py SPEC debug_launcher|notebook_launcher`."""

import json
import socket
import sys

from accelerate import PartialState, debug_launcher, notebook_launcher

from benchmarks.jobs import Hooks, run_job
from benchmarks.marks import mark


def train(spec):
    PartialState(cpu=True)  # joins the group where the launcher has not done it
    run_job(spec, Hooks())


def launch(launcher, spec):
    if launcher == "debug_launcher":
        debug_launcher(train, args=(spec,), num_processes=2)
    else:
        notebook_launcher(train, args=(spec,), num_processes=2, use_port=str(free_port()))


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    spec, launcher = json.loads(sys.argv[1]), sys.argv[2]
    for _ in range(spec["num_launches"]):
        mark("launch")
        launch(launcher, spec)
        mark("end")
