"""Which checkpoints are worth keeping: a value, and pure functions over the list of what is there."""

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from paceline.checkpoints.checkpoint import CheckpointInfo
from paceline.errors import ArgumentError

TIMESTAMP = "_timestamp"


@dataclass(frozen=True)
class CheckpointStrategy:
    """How many checkpoints stay on disk, which of them, and where.

    num_to_keep: None keeps all, K the best K, 0 writes none (the latest lives in memory only). The latest is
    always kept
        besides the best: it is where training goes on after a failure.
    checkpoint_score_attribute: the name of a number given to `save_checkpoint`, by which "best" is decided.
    The default
        stands for the time of saving: the newest is the best.
    checkpoint_score_order: "max" or "min". NaN is the worst in both; of equals, the newer is better.
    storage_path: a path or an fsspec URL (`s3://bucket/folder`) to use instead of the run folder.
    """

    num_to_keep: int | None = None
    checkpoint_score_attribute: str = TIMESTAMP
    checkpoint_score_order: str = "max"
    storage_path: str | None = None

    def __post_init__(self) -> None:
        keep, attribute, order = (
            self.num_to_keep,
            self.checkpoint_score_attribute,
            self.checkpoint_score_order,
        )
        if keep is not None and (type(keep) is not int or keep < 0):
            raise ArgumentError(f"num_to_keep is {keep!r}: give a number from 0 on, or None to keep all checkpoints.")
        if not isinstance(attribute, str) or not attribute:
            raise ArgumentError(f"checkpoint_score_attribute is {attribute!r}: name a value that save_checkpoint gets.")
        if order not in ("max", "min"):
            raise ArgumentError(f"checkpoint_score_order is {order!r}: give 'max' or 'min'.")
        if isinstance(self.storage_path, os.PathLike):
            object.__setattr__(self, "storage_path", os.fspath(self.storage_path))
        if self.storage_path is not None and (not isinstance(self.storage_path, str) or not self.storage_path):
            raise ArgumentError(
                f"storage_path is {self.storage_path!r}: give a path or a URL, or None for the run folder."
            )
        _, is_url, rest = (self.storage_path or "").rpartition("://")
        if is_url and not rest.strip("/"):
            raise ArgumentError(
                f"storage_path is {self.storage_path!r}, which names no place: give a bucket or a folder in it too."
            )

    def score_of(self, state: Mapping[str, Any]) -> float | None:
        """The score of a state about to be saved; None when time decides. ArgumentError if there is no such
        number.
        """
        name = self.checkpoint_score_attribute
        if name == TIMESTAMP:
            return None
        if name not in state:
            keys = ", ".join(map(repr, state)) or "none"
            raise ArgumentError(
                f"The checkpoint strategy ranks by {name!r}, but save_checkpoint got no such value "
                f"(it got: {keys}). "
                f"Pass {name}=..., or name one of these as checkpoint_score_attribute."
            )
        score = _as_float(state[name])
        if score is None:
            raise ArgumentError(
                f"The checkpoint strategy ranks by {name!r}, but that is a {type(state[name]).__name__}: "
                "give a number (a tensor or array without dimensions will do)."
            )
        return score


def ranked(infos: Iterable[CheckpointInfo], strategy: CheckpointStrategy) -> list[CheckpointInfo]:
    """All of them, the best first."""
    sign = 1.0 if strategy.checkpoint_score_order == "max" else -1.0

    def rank(info: CheckpointInfo) -> tuple[bool, float, int]:
        if strategy.checkpoint_score_attribute == TIMESTAMP:
            # ids grow with time even when the clock is set back
            return True, sign * info.id, info.id
        if info.score is None or math.isnan(info.score):
            return False, 0.0, info.id
        return True, sign * info.score, info.id

    return sorted(infos, key=rank, reverse=True)


def to_delete(
    infos: Iterable[CheckpointInfo], strategy: CheckpointStrategy, spare_id: int | None = None
) -> list[CheckpointInfo]:
    """Those that are neither among the best `num_to_keep` nor the latest nor `spare_id`, the worst last.

    With `num_to_keep` 0 or None there are none: in the one case nothing of ours is on disk, in the other all
    of it stays.
    """
    infos = list(infos)
    if not strategy.num_to_keep or not infos:
        return []
    latest = max(infos, key=lambda info: info.id)
    spared = (latest.id, spare_id)
    return [info for info in ranked(infos, strategy)[strategy.num_to_keep :] if info.id not in spared]


def _as_float(value: Any) -> float | None:
    if getattr(value, "shape", None) == () and callable(getattr(value, "item", None)):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return None
