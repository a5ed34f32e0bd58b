"""Where two runs began to read different rows: `paceline.data.diff`."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

from paceline.data.row_codec import Spans
from paceline.recording.row_history import History, read_history
from paceline.recording.row_spans import Cover, cover, nothing, without

_MOST_ROWS = 10

Rows = dict[str | None, list[Spans]]
"""Of one step, by dataset."""


@dataclass(frozen=True)
class RowDifference:
    """The first step at which two runs have read different rows, all ranks together, and some of these."""

    step: int
    dataset: str
    num_only_a: int
    num_only_b: int
    only_a: tuple[int, ...]
    only_b: tuple[int, ...]
    run_a: str
    run_b: str

    def __str__(self) -> str:
        one, other = (
            f"{name} has {num} rows that the other has not" + (f": {', '.join(map(str, rows))}" if rows else "")
            + (" …" if len(rows) < num else "")
            for name, num, rows in (
                (self.run_a, self.num_only_a, self.only_a), (self.run_b, self.num_only_b, self.only_b)
            )
        )  # fmt: skip
        return f"step {self.step}, {self.dataset}: {one}; {other}"


def diff(run_a: str | os.PathLike[str], run_b: str | os.PathLike[str]) -> RowDifference | None:
    """The first step at which two runs have read different rows; None if they have read the same in every step.

    Both were asked to `record_ids`. The rows of a step are those of all its ranks together: runs with different numbers
    of workers are the same if their batches are (`global_batch_size`). A step that one of them alone has differs.
    """
    histories = read_history(run_a), read_history(run_b)
    a, b = (_by_step(history) for history in histories)
    for step in sorted({*a, *b}):
        mine, theirs = a.get(step, {}), b.get(step, {})
        for name in {**mine, **theirs}:
            one, other = _cover(mine.get(name, [])), _cover(theirs.get(name, []))
            if len(one.starts) != len(other.starts) or not all(map(np.array_equal, one, other)):
                return _difference(step, name, one, other, histories)
    return None


def _by_step(history: History) -> dict[int, Rows]:
    found: dict[int, Rows] = {}
    for epoch in history.epochs:
        for step, _, spans in epoch.parts:
            found.setdefault(step, {}).setdefault(epoch.about.name, []).append(spans)
    return found


def _cover(parts: list[Spans]) -> Cover:
    if not parts:
        return nothing()
    return cover(*(np.concatenate(one) for one in zip(*parts, strict=True))).as_set()


def _difference(
    step: int, name: str | None, one: Cover, other: Cover, histories: tuple[History, History]
) -> RowDifference:
    mine, theirs = without(one, other), without(other, one)
    run_a, run_b = (history.run.name for history in histories)
    return RowDifference(
        step,
        name or "dataset",
        mine.num_rows,
        theirs.num_rows,
        mine.some(_MOST_ROWS),
        theirs.some(_MOST_ROWS),
        run_a,
        run_b,
    )
