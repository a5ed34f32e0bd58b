"""Read Parquet files as batches of tensors, without a launcher: `python read_in_processes.py SPEC READER`."""

import json
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks.reading import FEATURES, IMAGE_BYTES, in_processes


def pyarrow(spec, rank, skip):
    """Files in their order, batch by batch, and as little else as there can be: the limit."""
    files = _files(spec)
    for path in files[rank :: spec["world_size"]]:
        for batch in pq.ParquetFile(path).iter_batches(spec["batch_size"]):
            if skip > 0:
                skip -= batch.num_rows
                continue
            yield tensors_of(batch)


def dataloader(spec, rank, skip):
    """All in memory as an Arrow table, from which a DataLoader's batches are taken."""
    loader = torch.utils.data.DataLoader(
        table := Table(pa.concat_tables([pq.read_table(path) for path in _files(spec)]).combine_chunks()),
        spec["batch_size"],
        sampler=torch.utils.data.DistributedSampler(table, spec["world_size"], rank, shuffle=spec["shuffled"]),
        collate_fn=lambda batch: batch,
    )
    yield from loader


class Table(torch.utils.data.Dataset):
    def __init__(self, table):
        self.table = table

    def __len__(self):
        return self.table.num_rows

    def __getitems__(self, indices):
        return tensors_of(self.table.take(indices).combine_chunks().to_batches()[0])


def huggingface(spec, rank, skip):
    """In Arrow's format, the fastest that it has. Where to go on is told by its state."""
    for batch in _streamed(spec, rank, skip, "arrow"):
        yield tensors_of(batch.combine_chunks().to_batches()[0])


def huggingface_torch(spec, rank, skip):
    """In torch's: a tensor for each column."""
    for batch in _streamed(spec, rank, skip, "torch"):
        yield torch.stack([batch[name] for name in FEATURES], 1), batch["label"]


def _streamed(spec, rank, skip, form):
    import datasets
    from datasets.distributed import split_dataset_by_node

    def made():
        files = [str(path) for path in _files(spec)]
        rows = datasets.load_dataset(
            "parquet", data_files=files, split="train", streaming=True, cache_dir=str(Path.cwd() / "cache")
        )
        if spec["shuffled"]:
            rows = rows.shuffle(seed=0, buffer_size=10_000)
        return split_dataset_by_node(rows.with_format(form), rank, spec["world_size"])

    rows = made()
    if skip and skip not in STATES:
        for number, _ in enumerate(rows.iter(spec["batch_size"]), 1):
            if number * spec["batch_size"] >= skip:
                STATES[skip] = rows.state_dict()
                break
    if skip:
        rows = made()
        rows.load_state_dict(STATES[skip])
    return rows.iter(spec["batch_size"])


STATES = {}
"""Of a reader that can only be asked where it is: had by reading up to there, which the first round does."""


def litdata(spec, rank, skip):
    """Its own files, made of ours beforehand: a row is a pair, and its loader collates. It asks torch for the rank."""
    import litdata as ld
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo", f"file://{Path.cwd()}/group", rank=rank, world_size=spec["world_size"])
    rows = ld.StreamingDataset(spec["litdata"], shuffle=spec["shuffled"], drop_last=False)
    yield from ld.StreamingDataLoader(rows, batch_size=spec["batch_size"])


def _files(spec):
    return sorted(Path(spec["path"]).glob("*.parquet"))


def tensors_of(batch):
    label = torch.from_numpy(batch.column("label").to_numpy())
    if "image" not in batch.schema.names:
        return torch.from_numpy(batch.select(FEATURES).to_tensor(row_major=True).to_numpy()), label
    column = batch.column("image")
    if pa.types.is_binary(column.type):
        return images_of(column.to_pylist()), label
    return torch.from_numpy(column.flatten().to_numpy().reshape(-1, IMAGE_BYTES)), label


def images_of(values):
    return torch.from_numpy(np.frombuffer(bytearray(b"".join(values)), np.uint8).reshape(-1, IMAGE_BYTES))


READERS = {reader.__name__: reader for reader in (pyarrow, dataloader, huggingface, huggingface_torch, litdata)}

if __name__ == "__main__":
    in_processes(json.loads(sys.argv[1]), READERS[sys.argv[2]])
