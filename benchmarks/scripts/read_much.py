"""Read an epoch in the workers of a run and sample their memory: `python read_much.py SPEC`."""

import json
import sys
import threading
import time

import psutil
import torch

import paceline
import paceline.data
from benchmarks.marks import mark
from benchmarks.reading import FEATURES

EVERY_S = 0.05


def train(spec):
    torch.set_num_threads(1)
    torch.zeros(1)
    memory, begin = psutil.Process().memory_info, time.monotonic()
    before, samples, is_over = memory().rss, [], threading.Event()

    def sample():
        while not is_over.wait(EVERY_S):
            samples.append([time.monotonic() - begin, memory().rss])

    sampler = threading.Thread(target=sample)
    sampler.start()
    batches = paceline.get_data_shard().to_torch(1024, feature_columns=FEATURES, label_column="label")
    num_rows = sum(len(label) for _, label in batches)
    is_over.set()
    sampler.join()
    mark("memory", rank=paceline.world_rank(), before=before, samples=samples, rows=num_rows)


if __name__ == "__main__":
    spec = json.loads(sys.argv[1])
    rows = paceline.data.read_parquet(spec["path"]).random_shuffle()
    with paceline.Trainer(backend=paceline.BackendConfig(), num_workers=2) as trainer:
        trainer.run(train, spec, dataset=rows)
