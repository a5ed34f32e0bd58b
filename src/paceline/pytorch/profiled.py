"""A profiler for some of a trial's batches."""

from __future__ import annotations

from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from paceline.profiling import Profiler
from paceline.profiling.clock import Clock
from paceline.profiling.picture import draw
from paceline.profiling.torch_trace import traced
from paceline.profiling.verdict import Verdict

if TYPE_CHECKING:
    from paceline.pytorch.context import PyTorchTrialContext

PICTURE = "profile.png"


class Profiling:
    """From batch `first` to batch `last`, both counted from 0. Rank 0 says what was found. With `traces`, each rank has
    a trace of them beside TensorBoard's files."""

    def __init__(self, context: PyTorchTrialContext, sync: bool, first: int, last: int | None, traces: bool):
        self._context, self._first, self._last, self._traces = context, first, last, traces
        self._tracing = ExitStack()
        self._profiler = Profiler(sync=torch.cuda.synchronize if sync and torch.cuda.is_available() else None)
        self._is_told = False

    def at(self, batch: int) -> Clock | None:
        """The clock, if this batch is measured."""
        is_due = batch >= self._first and (self._last is None or batch <= self._last)
        if is_due != self._profiler.is_running:
            (self._start if is_due else self._stop)()
        return self._profiler.clock if is_due else None

    def _start(self) -> None:
        if self._traces:
            self._tracing.enter_context(traced(self._context.get_tensorboard_path()))
        self._profiler.start()

    def _stop(self) -> None:
        self._profiler.stop()
        self._tracing.close()

    def verdict(self) -> Verdict:
        """Of all that was measured: what is under way ends."""
        self._stop()
        return self._profiler.verdict()

    def close(self) -> None:
        self._stop()
        if self._context.distributed.is_chief and self._profiler.samples and not self._is_told:
            self._is_told = True
            print(self.verdict(), flush=True)
            self._show(self._context.core.run_dir)

    def _show(self, run_dir: Path | None) -> None:
        """A picture in the run folder, and scalars for TensorBoard, as far as these are installed."""
        samples = self._profiler.samples
        if run_dir is not None and find_spec("matplotlib") is not None:
            draw(samples, run_dir / PICTURE)
        if find_spec("tensorboardX") is None:
            return
        writer = self._context.get_tensorboard_writer()
        for number, sample in enumerate(samples):
            parts = {f"{name}_s": seconds for name, seconds in sample["parts_s"].items()}
            numbers = {**parts, **{name: value for name, value in sample.items() if name != "parts_s"}}
            for name, value in numbers.items():
                writer.add_scalar(f"profile/{name}", value, number)
