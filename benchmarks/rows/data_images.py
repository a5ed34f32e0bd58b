"""Parquet to batches of 256 images of 3 × 32 × 32 bytes, stored as lists and as binary: images per second."""

import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.figures import PER_SECOND, Row, ratio_at_least
from benchmarks.reading import rates, write_images
from benchmarks.rounds import Effort, in_turns
from benchmarks.systems import READ_DATALOADER, READ_HF, READ_PACELINE, READ_PYARROW, READ_RAY, System, run_reader

BATCH_SIZE, LEAST_RATIO = 256, 0.9
NUM_ROWS = {"lists": 40_000, "bytes": 200_000}
"""Lists take ten times as long to decode."""
NAMES = {"lists": "as lists of uint8", "bytes": "as binary, joined to a matrix by the reader"}


def measure(effort: Effort, say: Callable[[str], None]) -> list[Row]:
    return [_row(kind, effort, say) for kind in NAMES]


def _row(kind: str, effort: Effort, say: Callable[[str], None]) -> Row:
    readers = [READ_PACELINE, READ_PYARROW, READ_DATALOADER, READ_HF, *([READ_RAY] if kind == "lists" else [])]
    with tempfile.TemporaryDirectory(prefix="bench_data_") as folder:
        write_images(Path(folder), NUM_ROWS[kind], as_bytes=kind == "bytes")

        def samples(system: System) -> list[float]:
            spec = {"path": folder, "kind": kind, "batch_size": BATCH_SIZE, "shuffled": False, "world_size": 2}
            return rates(run_reader(system, num_rounds=2 if effort.is_quick else 4, **spec).marks)

        ours, limit, *peers = in_turns(readers, samples, effort, say)
    return Row(
        f"Parquet to batches of 256 images of 3 × 32 × 32 bytes, {NAMES[kind]}: 2 workers",
        PER_SECOND,
        ours,
        (limit, *peers),
        target=f"≥ {LEAST_RATIO} of plain pyarrow",
        is_met=ratio_at_least(PER_SECOND, ours, limit, LEAST_RATIO),
    )
