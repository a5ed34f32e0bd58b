"""Parquet to batches of tensors, 20 float32 columns and a label: rows per second, and the first batch.

Everybody makes a matrix of features and a label of every 1,024 rows. The files are in the page cache.
"""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import systems
from benchmarks.figures import MILLISECONDS, PER_SECOND, Figure, Row, ratio, ratio_at_least
from benchmarks.processes import MeasurementError
from benchmarks.reading import first_batches_s, rates, write_numbers
from benchmarks.rounds import Effort, in_turns
from benchmarks.systems import READ_LITDATA, READ_PACELINE, READ_PYARROW, System, run_reader, run_script

PEERS = (
    READ_PYARROW,
    systems.READ_DATALOADER,
    systems.READ_RAY,
    systems.READ_HF,
    systems.READ_HF_TORCH,
    READ_LITDATA,
)
HF_SHUFFLING = replace(systems.READ_HF, name="Hugging Face, Arrow, a buffer of 10,000 rows")
UNSHUFFLED = replace(READ_PYARROW, name="plain pyarrow, not shuffled")
SHUFFLING = (UNSHUFFLED, systems.READ_DATALOADER, systems.READ_RAY, HF_SHUFFLING, READ_LITDATA)
ROW_BY_ROW = (systems.READ_HF_TORCH, HF_SHUFFLING, READ_LITDATA)
MOSAIC = Figure("Mosaic Streaming", note="not run: 0.13.0 wants numpy < 2.2")
LEAST_RATIO = 0.9
NUM_ROWS, BATCH_SIZE = 4_000_000, 1024
NUM_FEW = 200_000
"""For those that take rows one by one, which is so slow that nothing else shows in their figures."""


def measure(effort: Effort, say: Callable[[str], None]) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="bench_data_") as name:
        folders = Folders(Path(name), say)
        one = _read(folders, (READ_PACELINE, READ_PYARROW), effort, say, 1)
        two = _read(folders, (READ_PACELINE, *PEERS), effort, say, 2)
        shuffled = _read(folders, (READ_PACELINE, *SHUFFLING), effort, say, 2, shuffled=True)
    what = "Parquet to batches of 1,024 × 20 float32 and a label, rows"
    return [
        _row(f"{what}: one process", one[0][0], one[0][1:], one[0][1]),
        _row(f"{what}: 2 workers", two[0][0], [*two[0][1:], MOSAIC], two[0][1]),
        _row(f"{what}: 2 workers, shuffled", shuffled[0][0], shuffled[0][1:], shuffled[0][1]),
        _first("not shuffled: from the call to the first batch of both", two[1]),
        _first("shuffled: from the call to the first batch of both", shuffled[1]),
    ]


def _first(what: str, figures: list[Figure]) -> Row:
    """Not later than the fastest peer's: plain pyarrow, the second, is the limit."""
    ours, _, *peers = figures
    ratios = [ratio(MILLISECONDS, ours, peer) for peer in peers]
    known = [found for found in ratios if found is not None]
    is_met = min(known) >= 1 if known else None
    return Row(what, MILLISECONDS, ours, tuple(figures[1:]), target="≤ the fastest peer's", is_met=is_met)


class Folders:
    """The files, as readers want them."""

    def __init__(self, root: Path, say: Callable[[str], None]):
        self.parquet, self.few, self.litdata = root / "parquet", root / "few", root / "litdata"
        say("writing files")
        for folder, num_rows in ((self.parquet, NUM_ROWS), (self.few, NUM_FEW)):
            folder.mkdir()
            write_numbers(folder, num_rows)
        self.problem: MeasurementError | None = None
        try:
            run_script("make_litdata.py", path=str(self.few), litdata=str(self.litdata))
        except MeasurementError as error:
            self.problem = error


def _read(
    folders: Folders,
    readers: tuple[System, ...],
    effort: Effort,
    say: Callable[[str], None],
    world_size: int,
    shuffled: bool = False,
) -> tuple[list[Figure], list[Figure]]:
    """Rows per second, and seconds to the first batch, by reader."""
    firsts: dict[str, list[float]] = {}

    def samples(system: System) -> list[float]:
        if system is READ_LITDATA and folders.problem is not None:
            raise folders.problem
        path = folders.few if system in ROW_BY_ROW else folders.parquet
        spec: dict[str, Any] = {"path": str(path), "litdata": str(folders.litdata), "kind": "numbers"}
        sizes = {"batch_size": BATCH_SIZE, "num_rounds": 2 if effort.is_quick or system.is_slow else 3}
        marks = run_reader(system, shuffled=shuffled, world_size=world_size, **spec, **sizes).marks
        firsts.setdefault(system.name, []).extend(first_batches_s(marks))
        return rates(marks)

    figures = in_turns(readers, samples, effort, say)
    return figures, [Figure(one.system, tuple(firsts.get(one.system, ())), one.problem) for one in figures]


def _row(what: str, ours: Figure, peers: list[Figure], limit: Figure) -> Row:
    is_met = ratio_at_least(PER_SECOND, ours, limit, LEAST_RATIO)
    target = f"≥ {LEAST_RATIO} of {limit.system}"
    return Row(what, PER_SECOND, ours, tuple(peers), target=target, is_met=is_met)
