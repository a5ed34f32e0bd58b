"""Random numbers that belong to a row: the same wherever, whenever and by whomever it is read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np

from paceline.data.seeds import derived_seed
from paceline.errors import TrainerStateError

_drawing: ContextVar[tuple[int, int, Any] | None] = ContextVar("paceline_drawing", default=None)


class Row(dict[str, Any]):
    """A row as the functions of `.map()` and `.filter()` get it: a dict, which knows its number."""

    def __init__(self, values: dict[str, Any], id: int):
        super().__init__(values)
        self.id = id


@contextmanager
def drawing_for(seed: int, epoch: int, ids: Any) -> Iterator[None]:
    """Inside, `sample_rng` draws for these rows."""
    token = _drawing.set((seed, epoch, ids))
    try:
        yield
    finally:
        _drawing.reset(token)


@contextmanager
def drawing_row(id: int) -> Iterator[None]:
    """Inside, it is this one of the rows that are being read."""
    seed, epoch, _ = _drawing.get() or (0, 0, None)
    with drawing_for(seed, epoch, id):
        yield


def sample_rng(row: Any = None) -> np.random.Generator:
    """A random generator for one row: it draws the same numbers wherever and whenever the row is read, and others in
    the next epoch.

    For functions that are given to `.map()`, and for the `__getitem__` of a map-style dataset. `row` is the row that
    the function got, or a row's number; without it, the row that is being read.
    """
    drawing = _drawing.get()
    if isinstance(row, Row):
        key: Any = row.id
    elif isinstance(row, int | np.integer):
        key = int(row)
    elif drawing is not None and isinstance(drawing[2], int):
        key = drawing[2]
    else:
        raise TrainerStateError(
            "sample_rng(): no row is being read here. Call it in a function given to .map() or in the dataset's "
            "__getitem__, or give it a row's number."
        )
    seed, epoch = (0, 0) if drawing is None else drawing[:2]
    return np.random.Generator(np.random.Philox(derived_seed("row", seed, epoch, key)))
