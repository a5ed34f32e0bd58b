"""All rows of a dataset, by the ids that a run records: read through once, in this process."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.data.dataset import Dataset
from paceline.data.dealing import Mark
from paceline.data.feed import Fed, Feed, ahead
from paceline.data.plan import Knowledge
from paceline.data.row_log import named_by

_AT_ONCE = 1 << 14


@dataclass(frozen=True)
class Nothing:
    """Of a batch, nothing is wanted but to know which rows are in it."""

    columns = ()
    is_costly = False

    def finish(self, rows: Any) -> Any:
        return rows

    def batch(self, rows: Any) -> None:
        return None


def all_ids(dataset: Dataset, id_column: str | None) -> Any:
    """In the order of the data's first epoch; of files, no column is read that decides nothing."""
    feed = Feed(named_by(dataset.tree, id_column), 0, 0, 1, _AT_ONCE, "uneven", Nothing())

    def epoch(executor: Executor) -> Any:
        return feed.epoch(0, Mark(), Knowledge(), executor)

    found: list[Fed] = list(ahead(epoch, 0))
    return np.concatenate([np.empty(0, np.int64), *(fed.ids for fed in found)])
