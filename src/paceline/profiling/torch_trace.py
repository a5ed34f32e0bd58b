"""A trace by torch's own profiler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from paceline import session


@contextmanager
def traced(folder: Path) -> Iterator[None]:
    """One file for each rank, which TensorBoard's profiler plugin, Perfetto and Chrome read."""
    folder.mkdir(parents=True, exist_ok=True)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        yield
    profiler.export_chrome_trace(str(folder / f"rank_{session.world_rank()}.pt.trace.json"))
