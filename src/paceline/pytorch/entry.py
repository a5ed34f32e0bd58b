"""`pytorch.init()`: where a trial begins, whoever has started the process."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist

from paceline import core, session
from paceline.callbacks import Callback, TBXLoggerCallback
from paceline.checkpoints import CheckpointStrategy
from paceline.errors import ArgumentTypeError
from paceline.prepare.reproducibility import enable_reproducibility
from paceline.prepare.scope import current_scope
from paceline.pytorch.context import PyTorchTrialContext


@contextmanager
def init(
    *,
    hparams: dict[str, Any] | None = None,
    exp_conf: dict[str, Any] | None = None,
    distributed: core.DistributedContext | None = None,
    aggregation_frequency: int = 1,
    seed: int | None = None,
    enable_tensorboard_logging: bool = True,
    logdir: str | os.PathLike[str] | None = None,
    callbacks: Sequence[Callback] | None = None,
    checkpoint_strategy: CheckpointStrategy | None = None,
) -> Iterator[PyTorchTrialContext]:
    """A context for trials. It finds out by itself where it is: in a worker of a `paceline.Trainer`, under a launcher
    such as `paceline run` or torchrun, or in a process of its own; and leaves the same run folder everywhere.

    Args:
        hparams: hyperparameters; `global_batch_size` among them is that of all ranks together.
        exp_conf: whatever else the trial is to know.
        distributed: who the ranks are, if the environment does not tell.
        aggregation_frequency: how many batches the optimizers wait for.
        seed: seeds everything, and allows deterministic algorithms only. Without it the data has an order of its own
            choice, equal on all ranks.
        enable_tensorboard_logging: metrics go to TensorBoard's files too, if tensorboardX is installed and no
            `callbacks` are given; in a worker, `Trainer.run` has the callbacks.
        logdir, callbacks, checkpoint_strategy: as `record_run` takes them; in a worker, `Trainer.run` has them.
    """
    if hparams is not None and not isinstance(hparams, dict):
        raise ArgumentTypeError(f"pytorch.init(hparams=...) is a {type(hparams).__name__}; expected a dict.")
    with ExitStack() as stack:
        if distributed is None:
            _join(stack)
        core_context = stack.enter_context(
            core.init(
                distributed=distributed,
                config=hparams,
                logdir=logdir,
                callbacks=_listeners(callbacks, enable_tensorboard_logging),
                checkpoint_strategy=checkpoint_strategy,
            )
        )
        if seed is not None:
            enable_reproducibility(seed)
        chosen = core_context.distributed.broadcast(_order_seed())
        context = PyTorchTrialContext(core_context, hparams, exp_conf, aggregation_frequency, chosen)
        stack.enter_context(context.leaving)
        yield context


def _listeners(callbacks: Sequence[Callback] | None, with_tensorboard: bool) -> Sequence[Callback] | None:
    """In a Trainer's worker, the driver has its own."""
    if callbacks is not None or not with_tensorboard or session.current() is not None:
        return callbacks
    return [TBXLoggerCallback()] if find_spec("tensorboardX") is not None else None


def _join(stack: ExitStack) -> None:
    """Ranks of a launcher that are no group yet become one."""
    if session.place().world_size > 1 and not dist.is_initialized() and "MASTER_ADDR" in os.environ:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        stack.callback(_leave)


_former_group: dist.ProcessGroup | None = None


def _leave() -> None:
    """The trial's models die later. Torch can hang if one of them has the last reference to the group."""
    global _former_group
    _former_group = dist.group.WORLD
    dist.destroy_process_group()


def _order_seed() -> int:
    """The user's, if there is one."""
    seed = current_scope().seed
    return torch.initial_seed() % 2**63 if seed is None else seed
