"""Offline processing of a dataset over all ranks: inference, mostly. Each row once, also after a restart."""

from __future__ import annotations

import abc
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

import paceline
from paceline import core
from paceline.data.dataset import Dataset
from paceline.data.making import as_dataset
from paceline.data.shard import Shard
from paceline.errors import ArgumentError, ArgumentTypeError
from paceline.prepare.device import get_device, move_batch
from paceline.prepare.model import prepare_model
from paceline.pytorch.reducers import MetricReducer, Reducers

_OUTPUT = "output"
_REFUSED = ("shuffle", "sampler", "batch_sampler", "batch_size", "drop_last")


class TorchBatchProcessorContext:
    """What a processor is given."""

    def __init__(self, core_context: core.Context, output: Path):
        self.core, self.distributed = core_context, core_context.distributed
        self.device = get_device()
        self.reducers = Reducers()
        self._output = output
        self._part = 0

    def prepare_model_for_inference(self, model: torch.nn.Module) -> torch.nn.Module:
        """On this rank's device, in evaluation mode."""
        return prepare_model(model, wrap_ddp=False).eval()

    def to_device(self, data: Any) -> Any:
        return move_batch(data, self.device)

    def wrap_reducer(self, reducer: Any, name: str | None = None) -> MetricReducer:
        """A metric over all rows: reported at the end. What its `per_slot_reduce` gives is kept with checkpoints, and
        has to be of what they can hold."""
        return self.reducers.wrap(reducer, name, for_training=False, for_validation=True)

    def get_distributed_rank(self) -> int:
        return self.distributed.rank

    def get_distributed_size(self) -> int:
        return self.distributed.size

    def report_metrics(self, group: str, steps_completed: int, metrics: Mapping[str, Any]) -> None:
        """As `core`'s: equally often on all ranks, or on rank 0 alone."""
        self.core.train.report_metrics(group, steps_completed, metrics)

    def get_tensorboard_path(self) -> Path:
        """A folder of the run's, whose files TensorBoard shows."""
        path = (self.core.run_dir or Path.cwd()) / "tensorboard"
        path.mkdir(parents=True, exist_ok=True)
        return path

    @contextmanager
    def upload_path(self) -> Iterator[Path]:
        """`output_dir`, as a block: what is written there is kept in the same way."""
        yield self.output_dir

    @property
    def output_dir(self) -> Path:
        """A folder for what this rank makes of the batches since the last checkpoint. With the next checkpoint it
        becomes final; what was written into one that never came is thrown away."""
        path = self._output / f".rank_{self.distributed.rank}_part_{self._part:06d}"
        path.mkdir(parents=True, exist_ok=True)
        return path

    def begin_part(self, number: int) -> None:
        """The folder for what comes now; empty."""
        self._part = number
        shutil.rmtree(self._output / f".rank_{self.distributed.rank}_part_{number:06d}", ignore_errors=True)

    def finish_part(self) -> None:
        """What was written counts. Idempotent: a restart may come between this and the checkpoint."""
        path = self._output / f".rank_{self.distributed.rank}_part_{self._part:06d}"
        if path.exists():
            target = self._output / path.name.removeprefix(".")
            shutil.rmtree(target, ignore_errors=True)
            os.replace(path, target)


class TorchBatchProcessor(abc.ABC):
    """One on each rank."""

    @abc.abstractmethod
    def __init__(self, context: TorchBatchProcessorContext): ...

    @abc.abstractmethod
    def process_batch(self, batch: Any, batch_idx: int) -> None:
        """Without gradients. Write what you make of it into `context.output_dir`."""

    def on_checkpoint_start(self) -> None:  # noqa: B027 - may be left out
        """Write out what you hold: what comes after it is processed again if a rank is lost."""

    def on_finish(self) -> None:  # noqa: B027 - may be left out
        """All rows of this rank are done."""


def torch_batch_process(
    batch_processor_cls: type[TorchBatchProcessor],
    dataset: Any,
    batch_size: int = 32,
    max_batches: int | None = None,
    checkpoint_interval: int = 5,
    dataloader_kwargs: Mapping[str, Any] | None = None,
    distributed_context: core.DistributedContext | None = None,
    *,
    output_dir: str | os.PathLike[str] | None = None,
    logdir: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """Hand every row of the dataset to a processor, on all ranks: in a Trainer's worker, under a launcher, or alone.

    Every `checkpoint_interval` batches of all ranks, what was made so far counts, and a run that is restarted goes on
    after it, with however many ranks. Gives the metrics of the reducers, over all rows; none if it was asked to stop,
    which it does after a checkpoint.

    Args:
        dataset: torch's, with a length; or one of `paceline.data`.
        batch_size: rows of one rank in a batch.
        max_batches: no more than that, of each rank.
        dataloader_kwargs: `num_workers`, `collate_fn`, `pin_memory` …
        output_dir: where `context.output_dir` is. Default: "output" in the run folder.
    """
    options = _checked(dataset, batch_size, max_batches, checkpoint_interval, dict(dataloader_kwargs or {}))
    with core.init(distributed=distributed_context, logdir=logdir) as core_context, ExitStack() as stack:
        output = Path(output_dir) if output_dir is not None else (core_context.run_dir or Path.cwd()) / _OUTPUT
        context = TorchBatchProcessorContext(core_context, output)
        ranks = core_context.distributed
        shard = Shard(as_dataset(dataset).tree, ranks.rank, ranks.size)
        stack.callback(shard.close)
        batches = shard.to_torch(batch_size, rest="uneven", **options)
        part, done = _go_on(shard, context.reducers)
        if ranks.is_chief:
            discard_from(output, part)
        ranks.allgather(None)
        context.begin_part(part)
        processor = batch_processor_cls(context)
        for batch_idx, batch in enumerate(batches, done):
            if max_batches is not None and batch_idx >= max_batches:
                break
            latest = shard.latest
            if latest is not None and latest.num_own:
                with torch.no_grad():
                    processor.process_batch(batch, batch_idx)
            done = batch_idx + 1
            if done % checkpoint_interval == 0:
                part += 1
                _save(processor, context, shard, part, done)
                core_context.train.report_progress(_share(batches, done, max_batches))
                if paceline.should_stop():
                    return {}
        processor.on_checkpoint_start()
        context.finish_part()
        processor.on_finish()
        metrics = context.reducers.reduce(False, ranks.allgather)
        ranks.allgather(None)  # nobody leaves before all are done
        if metrics:
            paceline.report(batches=done, **metrics)
        return metrics


def _checked(dataset: Any, batch_size: Any, max_batches: Any, interval: Any, options: dict[str, Any]) -> dict[str, Any]:
    for name, value in (("batch_size", batch_size), ("checkpoint_interval", interval)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ArgumentError(f"torch_batch_process({name}={value!r}): expected a whole number, at least 1.")
    if max_batches is not None and (
        isinstance(max_batches, bool) or not isinstance(max_batches, int) or max_batches < 1
    ):
        raise ArgumentError(f"torch_batch_process(max_batches={max_batches!r}): expected at least 1, or None for all.")
    wrong = [name for name in _REFUSED if name in options]
    if wrong:
        raise ArgumentError(
            f"torch_batch_process(dataloader_kwargs={{{wrong[0]!r}: ...}}): rows are processed in their order, each "
            "once; batch_size is an argument of its own."
        )
    if not isinstance(dataset, Dataset) and not hasattr(dataset, "__len__"):
        raise ArgumentTypeError(
            f"torch_batch_process() was given a {type(dataset).__name__} without a length; expected a map-style "
            "dataset of torch's, or one of paceline.data."
        )
    return options


def _go_on(shard: Shard, reducers: Reducers) -> tuple[int, int]:
    """The number of the part, and of the batch, to begin with. Reducers learn what was collected before."""
    checkpoint = paceline.load_checkpoint()
    if checkpoint is None:
        return 0, 0
    parts = [part for part in checkpoint.all_ranks if part]
    shard.go_on([part["shard"] for part in parts])
    reducers.former = [*checkpoint.get("former", ()), [part["reducers"] for part in parts]]
    return max(int(part["part"]) for part in parts), max(int(part["done"]) for part in parts)


def discard_from(output: Path, part: int) -> None:
    """What was finished and not saved any more is made again, by other ranks perhaps."""
    for path in output.glob("*rank_*_part_*"):
        number = path.name.rpartition("_")[2]
        if number.isdigit() and int(number) >= part:
            shutil.rmtree(path, ignore_errors=True)


def _save(
    processor: TorchBatchProcessor, context: TorchBatchProcessorContext, shard: Shard, part: int, done: int
) -> None:
    processor.on_checkpoint_start()
    context.finish_part()
    reducers = context.reducers
    own = {"shard": shard.state(), "part": part, "done": done, "reducers": reducers.state(is_training=False)}
    paceline.save_checkpoint(batches=done, former=reducers.former, per_rank=own)
    context.begin_part(part)


def _share(batches: Any, done: int, max_batches: int | None) -> float:
    try:
        total = len(batches)
    except TypeError:
        return 0.0
    return min(1.0, done / max(1, total if max_batches is None else min(total, max_batches)))
