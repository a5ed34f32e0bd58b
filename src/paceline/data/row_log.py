"""What a rank's shards have handed out since it last told the driver: `record_ids`."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from paceline.data import row_codec
from paceline.data.base import Blocks
from paceline.data.dataset import Dataset
from paceline.data.membership import Subset
from paceline.data.plan import known_size
from paceline.data.shard import Shard
from paceline.data.tree import First, Leaf, Mixture, Repeated, Tree, has_limit, with_leaves

MOST_WAITING = 1 << 16
"""Rows that wait for a report. Of a loop that reports seldom, they are told in between."""


class RowLog:
    """The listener of all shards of one rank. The session asks it for a message with every report and save."""

    def __init__(self, id_column: str | None, tell: Callable[[], None]):
        """`tell` is called when many rows wait: it asks for a message and sends it."""
        self._id_column, self._tell = id_column, tell
        self._data: dict[str, int] = {}
        self._waiting: deque[tuple[int, int, Any]] = deque()
        """Which data, which epoch, and ids; or as bytes what else there is to say. One thread may report while another
        reads: nothing is lost in between, since each piece goes in and out by itself."""
        self._num_waiting = self._num_messages = 0

    def shard(
        self, key: str, dataset: Dataset, name: str | None, rank: int, world_size: int, seed: Callable[[], int]
    ) -> Shard:
        """A shard of this dataset, whose batches are noted. `key` is that of its position: what is read on its own is
        counted on its own, also if it gives the same rows as another."""
        number = self._data.setdefault(key, len(self._data))
        tree = named_by(dataset.tree, self._id_column)
        about = {"key": key, "name": name, "column": self._id_column, **shape_of(tree)}
        self._waiting.append((number, 0, row_codec.item(row_codec.DATA, number, 0, json.dumps(about).encode())))

        def took(epoch: int, ids: Any) -> None:
            self._waiting.append((number, epoch, ids))
            self._num_waiting += len(ids)
            if self._num_waiting > MOST_WAITING:
                self._tell()

        def ended(epoch: int, num_left_out: int) -> None:
            self._waiting.append((number, epoch, row_codec.encoded_end(number, epoch, num_left_out)))

        return Shard(tree, rank, world_size, seed, took, ended)

    def message(self, step: int, save: int) -> bytes | None:
        """All that waits, which is then forgotten; None if that is nothing."""
        waiting = [self._waiting.popleft() for _ in range(len(self._waiting))]
        self._num_waiting = 0
        if not waiting:
            return None
        head = row_codec.MESSAGE.pack(step, save, self._num_messages)
        self._num_messages += 1
        if len(waiting) == 1:  # as in nearly every step
            return head + _encoded(*waiting[0])
        return head + b"".join([_encoded(*one) for one in _joined(waiting)])


def _encoded(data: int, epoch: int, ids: Any) -> bytes:
    if type(ids) is bytes:
        return ids
    array = np.asarray(ids)  # of a loader with processes, it is a tensor
    return row_codec.encoded_ids(data, epoch, array) if len(array) else b""


def _joined(waiting: list[tuple[int, int, Any]]) -> list[tuple[int, int, Any]]:
    """Batches of one epoch together."""
    found: list[tuple[int, int, Any]] = []
    batches: dict[tuple[int, int], list[Any]] = {}
    for data, epoch, ids in waiting:
        if type(ids) is bytes:
            found.append((data, epoch, ids))
        else:
            batches.setdefault((data, epoch), []).append(np.asarray(ids))
    return [*found, *((*key, parts[0] if len(parts) == 1 else np.concatenate(parts)) for key, parts in batches.items())]


def named_by(tree: Tree, id_column: str | None) -> Tree:
    """The same rows, known by that column if it is one."""
    return tree if id_column is None else with_leaves(tree, lambda leaf: replace(leaf, id_column=id_column))


def shape_of(tree: Tree) -> dict[str, Any]:
    """What a reader has to know to say which rows are missing. By source: how many rows it has, if they are numbered
    from 0 on without gaps, and how often each comes in an epoch."""
    sources = [[_num_numbered(leaf), times] for leaf, times in _times(tree, 1)]
    return {"num_rows": known_size(tree), "sources": sources, "is_cut": has_limit(tree)}


def _num_numbered(leaf: Leaf) -> int | None:
    """Not of a fold: its rows have the numbers that they have in the whole data."""
    source = leaf.source
    has_gaps = isinstance(source, Subset) or any(op.drops_rows for op in leaf.ops)
    if has_gaps or (isinstance(source, Blocks) and any(block.first_row is None for block in source.blocks())):
        return None
    return known_size(leaf)


def _times(tree: Tree, times: int) -> list[tuple[Leaf, int]]:
    match tree:
        case Leaf():
            return [(tree, times)]
        case Mixture(children, _):
            return [one for child in children for one in _times(child, times)]
        case Repeated(child, more):
            return _times(child, times * more)
        case First(child, _):
            return _times(child, times)
