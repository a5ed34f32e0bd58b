"""Save 500 MB again and again, in turns with Paceline and with torch.save: `python save_checkpoints.py SPEC`."""

import json
import os
import sys
import time
from pathlib import Path

import torch

import paceline
from benchmarks.marks import MARKS_FILE, mark

NUM_TENSORS, NUM_ELEMENTS = 25, 5_000_000  # 500 MB of float32


def train(spec):
    if paceline.world_rank() != 0:
        return
    state = {f"layer_{index}": torch.randn(NUM_ELEMENTS) for index in range(NUM_TENSORS)}
    for _ in range(spec["num_saves"]):
        for tensor in state.values():
            tensor.add_(0.001)  # as an optimizer would
        with timed("paceline"):
            paceline.save_checkpoint(model=state)
        paceline.load_checkpoint()  # waits for the commit, for which training leaves time
        path = Path(os.environ[MARKS_FILE]).with_name("state.pt")
        with timed("torch_save"), path.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        path.unlink()


class timed:
    def __init__(self, name):
        self.name = name

    def __enter__(self):
        self.begin = time.perf_counter()

    def __exit__(self, *exception):
        mark(self.name, seconds=time.perf_counter() - self.begin)


if __name__ == "__main__":
    with paceline.Trainer(backend="torch", num_workers=2) as trainer:
        strategy = paceline.CheckpointStrategy(num_to_keep=1)
        trainer.run(train, json.loads(sys.argv[1]), checkpoint_strategy=strategy)
