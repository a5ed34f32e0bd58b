"""`core.init`: a script of any kind becomes a run, wherever it is started.

inside a Trainer's worker      what is there is used: its session, its run folder
python train.py, a notebook    this process records itself
torchrun and its like          rank 0 records all ranks
"""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline import session
from paceline.arguments import strategy_of
from paceline.callbacks import Callback
from paceline.checkpoints import CheckpointStrategy
from paceline.core.checkpoint import CheckpointContext
from paceline.core.distributed import DistributedContext
from paceline.core.preempt import PreemptContext, PreemptMode, mode_of
from paceline.core.record import recorded
from paceline.core.train import TrainContext
from paceline.errors import ArgumentError
from paceline.rank_session import Session

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Context:
    """What `core.init` gives, on every rank."""

    distributed: DistributedContext
    train: TrainContext
    checkpoint: CheckpointContext
    preempt: PreemptContext
    run_dir: Path | None
    """The run folder; None in a Trainer's worker on a machine that does not see it."""

    if not TYPE_CHECKING:  # a type checker shall go on to say that they are not there

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(_ELSEWHERE.get(name, f"The context of core.init() has no {name!r}."))


_ELSEWHERE = {
    "searcher": "The context of core.init() has no searcher, because nobody else decides how long a script trains: "
    "loop as long as its own arguments say, and tell how far it is with context.train.report_progress(0.3).",
    "profiler": "The context of core.init() has no profiler: use `with paceline.profile() as profiler`.",
}
"""What Determined has in its context."""


@contextmanager
def init(
    distributed: DistributedContext | None = None,
    config: dict[str, Any] | None = None,
    checkpoint_storage: str | os.PathLike[str] | None = None,
    logdir: str | os.PathLike[str] | None = None,
    callbacks: Sequence[Callback] | None = None,
    checkpoint_strategy: CheckpointStrategy | None = None,
    preempt_mode: PreemptMode | str = PreemptMode.WorkersAskChief,
    checkpoint: dict[str, Any] | str | os.PathLike[str] | None = None,
) -> Iterator[Context]:
    """Inside the block, on every rank, there is a run: `paceline.report`, `save_checkpoint`, `load_checkpoint` and
    `should_stop` work, as do the parts of the context. All ranks enter it; it waits until they have come.

    `distributed` says which ranks there are; by default that is found out. `checkpoint_storage` is a folder or URL for
    the checkpoints, as `CheckpointStrategy(storage_path=...)`. The other arguments are those of `record_run`. In a
    Trainer's worker the run is the Trainer's, with its config, callbacks and folder.
    """
    mode = mode_of(preempt_mode)
    running = session.current()
    if running is not None:
        with _used(running, distributed) as here:
            _tell_unused(running, logdir, checkpoint_storage, callbacks, checkpoint_strategy, checkpoint)
            yield _context(running, here, mode)
        return
    strategy = _strategy(checkpoint_strategy, checkpoint_storage)
    with (
        distributed or DistributedContext.here() as here,
        recorded(here, config, callbacks=callbacks, logdir=logdir, checkpoint=checkpoint, strategy=strategy) as running,
    ):
        yield _context(running, here, mode)


def _context(running: Session, distributed: DistributedContext, mode: PreemptMode) -> Context:
    return Context(
        distributed,
        TrainContext(running),
        CheckpointContext(running, distributed),
        PreemptContext(running, mode),
        running.run_dir,
    )


@contextmanager
def _used(running: Session, given: DistributedContext | None) -> Iterator[DistributedContext]:
    """In a run that is there."""
    place = running.place
    if given is not None and (given.rank, given.size) != (place.world_rank, place.world_size):
        raise ArgumentError(
            f"core.init(distributed=...) says rank {given.rank} of {given.size}, and this is rank {place.world_rank} "
            f"of {place.world_size} of a run: leave it out."
        )
    with given or DistributedContext.here() as here:
        yield here


def _tell_unused(running: Session, *given: object) -> None:
    names = ("logdir", "checkpoint_storage", "callbacks", "checkpoint_strategy", "checkpoint")
    unused = [name for name, value in zip(names, given, strict=True) if value is not None]
    if unused and running.place.world_rank == 0:
        logger.warning(
            "core.init(%s=...) is not used: the run that this is part of has its own.", "=..., ".join(unused)
        )


def _strategy(strategy: CheckpointStrategy | None, storage: str | os.PathLike[str] | None) -> CheckpointStrategy:
    if storage is None:
        return strategy_of(strategy)
    if strategy is not None and strategy.storage_path is not None:
        raise ArgumentError(
            "core.init(checkpoint_storage=..., checkpoint_strategy=...): both say where checkpoints go. Give one."
        )
    return replace(strategy_of(strategy), storage_path=os.fspath(storage))
