"""Which device this worker computes on, and how a batch gets there."""

from __future__ import annotations

from typing import Any

import torch

from paceline import session
from paceline.prepare.nesting import map_tensors
from paceline.workers.base import Place


def get_device() -> torch.device:
    """This worker's GPU if it was given one, else the CPU. Outside a worker the GPU of the local rank that a launcher
    gave, the first without one, as far as there are any."""
    return device_at(session.place(), in_worker=session.in_worker(), num_gpus=_num_gpus())


def device_at(place: Place, *, in_worker: bool, num_gpus: int) -> torch.device:
    """A worker's place decides alone: one that was started without GPUs stays off those it can see, as under `paceline
    run`, where all see all of them."""
    if in_worker:
        return torch.device("cpu") if place.device_index is None else torch.device("cuda", place.device_index)
    return torch.device("cuda", place.local_rank % num_gpus) if num_gpus else torch.device("cpu")


def _num_gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def move_batch(batch: Any, device: torch.device, *, non_blocking: bool = False) -> Any:
    """Move every tensor of a nested batch; an object with a `to` method of its own is asked to move."""

    def move(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            return part.to(device, non_blocking=non_blocking)
        return part.to(device)

    return map_tensors(move, batch, is_leaf=_moves_itself)


def _moves_itself(part: Any) -> bool:
    return not isinstance(part, type) and callable(getattr(part, "to", None))
