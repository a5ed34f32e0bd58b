"""Read Parquet files as batches of tensors with Ray Data, in actors: `python read_with_ray.py SPEC`."""

import json
import sys

import ray
import torch

from benchmarks.local_ray import local_ray
from benchmarks.reading import FEATURES, time_rounds


@ray.remote
class Rank:
    def read(self, spec, rank, shard):
        def batches(spec, rank, skip):
            for batch in shard.iter_torch_batches(batch_size=spec["batch_size"]):
                if spec["kind"] == "numbers":
                    yield torch.stack([batch[name] for name in FEATURES], 1), batch["label"]
                else:
                    yield batch["image"], batch["label"]

        time_rounds(spec, rank, batches)


if __name__ == "__main__":
    spec = json.loads(sys.argv[1])
    with local_ray(2 + spec["world_size"]):
        ray.data.DataContext.get_current().enable_progress_bars = False
        rows = ray.data.read_parquet(spec["path"], shuffle="files" if spec["shuffled"] else None)
        shards = rows.streaming_split(spec["world_size"], equal=True)
        ranks = [(Rank.remote(), rank, shard) for rank, shard in enumerate(shards)]
        ray.get([one.read.remote(spec, rank, shard) for one, rank, shard in ranks])
