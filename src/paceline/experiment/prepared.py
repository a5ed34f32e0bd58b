"""A worker's side of prepared batches: the rows of a dataset, opened from the cache."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import paceline
from paceline import session
from paceline.data.making import as_dataset
from paceline.data.prepared_cache import ROWS, hold
from paceline.data.row_numbers import numbers_of
from paceline.data.torch_prepared import PreparedRows
from paceline.experiment.shards import Ready

logger = logging.getLogger(__name__)


def open_prepared(name: str, dataset: Any, folder: str) -> Ready | None:
    """None if this worker does not find it, or finds something else: then it makes the same batches on the fly, and
    says so. What is opened is held until the function has ended: nobody removes it meanwhile."""
    held = hold(Path(folder))
    if held is None:
        logger.warning(
            "%s: rank %d does not see the prepared batches in %s, and makes them on the fly. They must be on storage "
            "that all nodes share, which PACELINE_STORAGE names, and stay there.",
            name,
            paceline.world_rank(),
            folder,
        )
        return None
    try:
        rows = PreparedRows(held.path / ROWS)
        described = as_dataset(dataset, name)
        total = described.num_rows()
        if total is not None and total != len(rows):
            raise ValueError(f"it has {len(rows)} rows, and the dataset {total}")
        numbers = numbers_of(described.tree.source, len(rows), type(dataset).__name__)  # type: ignore[union-attr]
    except Exception as error:  # whatever a damaged file makes Arrow say
        held.release()
        logger.warning("%s: the prepared batches in %s cannot be used (%s): made on the fly.", name, folder, error)
        return None
    running = session.current()
    if running is not None:
        running.cleanups.callback(held.release)
    is_shuffled = getattr(dataset, "shuffle", False) is True
    return Ready(numbers.random_shuffle() if is_shuffled else numbers, rows, dataset.ray_map_batches)
