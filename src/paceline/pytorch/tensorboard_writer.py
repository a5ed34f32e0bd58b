"""TensorBoard's files of a trial."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.callbacks.optional_package import environment_defaults, require


def open_writer(path: Path, rank: int) -> Any:
    require("tensorboardX", "tensorboard", "context.get_tensorboard_writer()")
    with environment_defaults(CRC32C_SW_MODE="auto"):  # importing it sets this variable, and would leave it set
        from tensorboardX import SummaryWriter
    return SummaryWriter(str(path), filename_suffix=f".rank{rank}", flush_secs=2)
