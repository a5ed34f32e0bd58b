"""Whether the ranks can talk to each other."""

from __future__ import annotations

import torch

from paceline.errors import TrainerStateError
from paceline.prepare.scope import current_place


def check_group(wish: str, otherwise: str = "") -> None:
    """Raise unless there is a process group; `wish` says what for, `otherwise` what else may be done."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return
    other_way = f", or {otherwise}" if otherwise else ""
    raise TrainerStateError(
        f"{wish} of {current_place().world_size} workers, but they form no process group. Use "
        f"Trainer(backend='torch'), call torch.distributed.init_process_group first{other_way}."
    )
