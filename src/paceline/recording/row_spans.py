"""Sets of rows as stretches of numbers, so that a million rows in a row take no more than one. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

_LAST = np.iinfo(np.int64).max


class Cover(NamedTuple):
    """Stretches in ascending order that do not overlap, from `starts` up to before `stops`, and how often each is
    there. Two that touch differ in that: so equal sets are equal arrays."""

    starts: Any
    stops: Any
    counts: Any

    @property
    def num_rows(self) -> int:
        return int((self.stops - self.starts).sum())

    def where(self, is_wanted: Any) -> Cover:
        return Cover(self.starts[is_wanted], self.stops[is_wanted], self.counts[is_wanted])

    def some(self, most: int) -> tuple[int, ...]:
        """The first rows of it."""
        found: list[int] = []
        for start, stop in zip(self.starts.tolist(), self.stops.tolist(), strict=True):
            found += range(start, min(stop, start + most - len(found)))
            if len(found) >= most:
                break
        return tuple(found)

    def as_set(self) -> Cover:
        return cover(self.starts, self.stops - 1)


def cover(firsts: Any, lasts: Any) -> Cover:
    """Of stretches that may overlap, each from its first row to its last."""
    ends = np.where(lasts == _LAST, _LAST, lasts + 1)  # the very last number is no row
    points = np.concatenate([firsts, ends])
    changes = np.concatenate([np.ones(len(firsts), np.int64), -np.ones(len(ends), np.int64)])
    return _swept(points, changes)


def _swept(points: Any, changes: Any) -> Cover:
    order = np.argsort(points, kind="stable")
    points, levels = points[order], np.cumsum(changes[order])
    is_last = np.append(points[1:] != points[:-1], True) if len(points) else np.empty(0, bool)
    points, levels = points[is_last], levels[is_last]
    is_new = levels != np.append(0, levels[:-1])[: len(levels)]
    points, levels = points[is_new], levels[is_new]
    made = Cover(points[:-1], points[1:], levels[:-1])
    return made.where(made.counts > 0)


def nothing() -> Cover:
    return cover(np.empty(0, np.int64), np.empty(0, np.int64))


def up_to(sizes: Sequence[tuple[int, int]]) -> Cover:
    """So many rows from each of these on: (first, size)."""
    firsts = np.array([first for first, size in sizes if size], np.int64)
    return cover(firsts, firsts + np.array([size for _, size in sizes if size], np.int64) - 1)


def without(these: Cover, those: Cover) -> Cover:
    """The rows of `these` that `those` has not. As sets."""
    points = np.concatenate([these.starts, these.stops, those.starts, those.stops])
    ones, others = np.ones(len(these.starts), np.int64), np.full(len(those.starts), 2, np.int64)
    made = _swept(points, np.concatenate([ones, -ones, others, -others]))  # 1: these alone, 2: those alone, 3: both
    return made.where(made.counts == 1)


def union(covers: Sequence[Cover]) -> Cover:
    starts = np.concatenate([one.starts for one in covers])
    return cover(starts, np.concatenate([one.stops for one in covers]) - 1).as_set()
