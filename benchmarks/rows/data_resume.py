"""From the call to the first batch in the middle of an epoch of 10 million rows, over that of a fresh start."""

import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.figures import MILLISECONDS, Figure, Row, judged
from benchmarks.reading import first_batches_s, write_numbers
from benchmarks.rounds import Effort, in_turns
from benchmarks.systems import READ_HF, READ_PACELINE, READ_PYARROW, System, run_reader

NUM_ROWS, LIMIT_S = 10_000_000, 0.05
MIDDLE = NUM_ROWS // 2


def measure(effort: Effort, say: Callable[[str], None]) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="bench_data_") as folder:
        say("writing files")
        write_numbers(Path(folder), NUM_ROWS)

        def over_a_fresh_start_s(system: System) -> list[float]:
            spec = {"path": folder, "kind": "numbers", "batch_size": 1024, "world_size": 1}
            # Shuffled for us alone, which is the harder case: the peers read in the order of the files.
            sizes = {"shuffled": system is READ_PACELINE, "skips": [0, MIDDLE], "first_only": True}
            marks = run_reader(system, num_rounds=3 if effort.is_quick else 6, **spec, **sizes).marks
            pairs = zip(first_batches_s(marks), first_batches_s(marks, MIDDLE), strict=True)
            return [resumed - fresh for fresh, resumed in pairs]

        ours, *peers = in_turns((READ_PACELINE, READ_PYARROW, READ_HF), over_a_fresh_start_s, effort, say)
    return [
        Row(
            "the first batch after resuming at row 5,000,000 of 10,000,000, over the first one of a fresh start",
            MILLISECONDS,
            ours,
            (*peers, Figure("Ray Data", note="not measured: its iterators offer no position to save")),
            target=f"≤ {LIMIT_S * 1e3:.0f} ms",
            is_met=judged(ours, lambda value: value <= LIMIT_S),
            note="pyarrow reads through the rows before it",
            has_ratios=False,
        )
    ]
