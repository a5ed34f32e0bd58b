"""Run a job under torchrun: `torchrun --nproc-per-node 2 with_torchrun.py SPEC`."""

import gc
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.jobs import Hooks, run_job
from benchmarks.marks import MARKS_FILE

CHECKPOINT = Path(os.environ[MARKS_FILE]).with_suffix(".pt")


def save(state):
    if dist.get_rank() == 0:
        unfinished = CHECKPOINT.with_suffix(".part")
        with unfinished.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(CHECKPOINT)


def load():
    return torch.load(CHECKPOINT) if CHECKPOINT.exists() else None


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run_job(json.loads(sys.argv[1]), Hooks(save=save, load=load))
    gc.collect()  # a DDP model that outlives its group can abort the interpreter
    dist.destroy_process_group()
