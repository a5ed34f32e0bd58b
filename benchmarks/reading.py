"""The data that is read, and how reading is timed: the same for every reader.

A reader is a function of (spec, rank, skip) that gives batches: pairs of tensors, features and label, of `batch_size`
rows. `skip` is how many rows of the epoch are had already, of all ranks together.
"""

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.marks import MARKS_FILE, Mark, mark

FEATURES = [f"f{number}" for number in range(20)]
IMAGE_BYTES = 3 * 32 * 32
NUM_FILES = 4

Reader = Callable[[dict[str, Any], int, int], Iterator[Any]]


def write_numbers(folder: Path, num_rows: int, row_group: int = 65_536) -> None:
    """20 columns of float32 and a label of int64; numbers that do not compress."""
    draw = np.random.default_rng(0)
    for number in range(NUM_FILES):
        size = num_rows // NUM_FILES
        columns = {name: draw.random(size, dtype=np.float32) for name in FEATURES}
        _write(folder, number, {**columns, "label": draw.integers(0, 10, size)}, row_group)


def write_images(folder: Path, num_rows: int, as_bytes: bool, row_group: int = 1_000) -> None:
    """A column of 3 x 32 x 32 bytes, as a list of uint8 or as binary, and a label."""
    draw = np.random.default_rng(0)
    for number in range(NUM_FILES):
        size = num_rows // NUM_FILES
        pixels = draw.integers(0, 256, (size, IMAGE_BYTES), dtype=np.uint8)
        flat = pa.array(pixels.reshape(-1))
        image = pa.array([one.tobytes() for one in pixels]) if as_bytes else _lists(flat, size)
        _write(folder, number, {"image": image, "label": draw.integers(0, 10, size)}, row_group)


def _lists(values: Any, size: int) -> Any:
    return pa.ListArray.from_arrays(pa.array(np.arange(size + 1, dtype=np.int32) * IMAGE_BYTES), values)


def _write(folder: Path, number: int, columns: dict[str, Any], row_group: int) -> None:
    pq.write_table(pa.table(columns), folder / f"{number}.parquet", row_group_size=row_group, use_dictionary=False)


def time_rounds(spec: dict[str, Any], rank: int, read: Reader) -> None:
    """A mark for each epoch: its rows, when it began, and how long the first batch took."""
    for number in range(spec["num_rounds"]):
        for skip in spec.get("skips", [0]):
            _meet(f"{number}-{skip}", rank, spec["world_size"])
            rows, first_s, begin = 0, 0.0, time.monotonic()
            for _, label in read(spec, rank, skip):
                first_s = first_s or time.monotonic() - begin
                rows += len(label)
                if spec.get("first_only"):
                    break
            mark("epoch", round=number, rank=rank, skip=skip, rows=rows, begin=begin, first_s=first_s)


def _meet(name: str, rank: int, world_size: int) -> None:
    """Wait for all ranks, whoever started them. Without it, the time in which a rank comes late would count as reading,
    and an epoch may take less than that."""
    folder = Path(os.environ[MARKS_FILE]).parent / "meetings"
    folder.mkdir(exist_ok=True)
    (folder / f"{name}-{rank}").touch()
    while not all((folder / f"{name}-{other}").exists() for other in range(world_size)):
        time.sleep(0.001)


def in_processes(spec: dict[str, Any], read: Reader) -> None:
    """Each rank in a process of its own."""
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=time_rounds, args=(spec, rank, read)) for rank in range(spec["world_size"])]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join()
    if any(one.exitcode for one in ranks):
        raise SystemExit(f"the ranks ended with {[one.exitcode for one in ranks]}")


def rates(marks: list[Mark]) -> list[float]:
    """Rows per second of all ranks together, for each round but the first, which loads code."""
    return [
        sum(one["rows"] for one in each) / (max(one["at"] for one in each) - min(one["begin"] for one in each))
        for each in _rounds(marks)[1:]
    ]


def first_batches_s(marks: list[Mark], skip: int = 0) -> list[float]:
    """Until the last rank has its first batch, for each round but the first."""
    return [max(one["first_s"] for one in each if one["skip"] == skip) for each in _rounds(marks)[1:]]


def _rounds(marks: list[Mark]) -> list[list[Mark]]:
    epochs = [one for one in marks if one["name"] == "epoch"]
    if not epochs:
        raise ValueError("it has read nothing")
    return [[one for one in epochs if one["round"] == number] for number in range(epochs[-1]["round"] + 1)]
