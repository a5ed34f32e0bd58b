"""Make LitData's files of some rows of Parquet files: `python make_litdata.py SPEC`."""

import json
import sys
from pathlib import Path

import litdata
import pyarrow.parquet as pq

from benchmarks.scripts.read_in_processes import tensors_of


def rows_of(path):
    """Pairs of features and label."""
    for batch in pq.ParquetFile(path).iter_batches(1024):
        yield from zip(*(tensor.clone() for tensor in tensors_of(batch)), strict=True)


if __name__ == "__main__":
    spec = json.loads(sys.argv[1])
    paths = sorted(str(path) for path in Path(spec["path"]).glob("*.parquet"))
    litdata.optimize(rows_of, paths, spec["litdata"], num_workers=1, chunk_bytes="32MB")
