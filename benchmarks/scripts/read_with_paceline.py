"""Read Parquet files as batches of tensors in the workers of a run: `python read_with_paceline.py SPEC`."""

import json
import sys

import torch

import paceline
import paceline.data
from benchmarks.reading import FEATURES, time_rounds
from benchmarks.scripts.read_in_processes import images_of
from paceline.data.dealing import Mark


def read(spec, rank, skip):
    shard = paceline.get_data_shard()
    if "skips" in spec:
        shard.go_on_from({0: Mark(skip)})
    if spec["kind"] == "bytes":
        for batch in shard.iter_torch_batches(spec["batch_size"]):
            yield images_of(batch["image"]), batch["label"]
        return
    columns = FEATURES if spec["kind"] == "numbers" else ["image"]
    yield from shard.to_torch(spec["batch_size"], feature_columns=columns, label_column="label")


def train(spec):
    torch.set_num_threads(1)
    time_rounds(spec, paceline.world_rank(), read)


if __name__ == "__main__":
    spec = json.loads(sys.argv[1])
    rows = paceline.data.read_parquet(spec["path"])
    if spec["shuffled"]:
        rows = rows.random_shuffle()
    with paceline.Trainer(backend=paceline.BackendConfig(), num_workers=spec["world_size"]) as trainer:
        trainer.run(train, spec, dataset=rows)
