"""Which device this worker computes on, and how a batch gets there."""

from __future__ import annotations

from typing import Any

import torch

from paceline.prepare.nesting import map_tensors
from paceline.prepare.scope import current_place
from paceline.workers.base import Place


def get_device() -> torch.device:
    """This worker's GPU if it was given one, else the CPU; outside a worker the first GPU if there is any."""
    return device_at(current_place(), cuda_available=torch.cuda.is_available())


def device_at(place: Place | None, *, cuda_available: bool) -> torch.device:
    """A worker's place decides alone: one that was started without GPUs stays off those it can see."""
    if place is None:
        return torch.device("cuda", 0) if cuda_available else torch.device("cpu")
    return torch.device("cpu") if place.device_index is None else torch.device("cuda", place.device_index)


def move_batch(batch: Any, device: torch.device, *, non_blocking: bool = False) -> Any:
    """Move every tensor of a nested batch; an object with a `to` method of its own is asked to move."""

    def move(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            return part.to(device, non_blocking=non_blocking)
        return part.to(device)

    return map_tensors(move, batch, is_leaf=_moves_itself)


def _moves_itself(part: Any) -> bool:
    return not isinstance(part, type) and callable(getattr(part, "to", None))
