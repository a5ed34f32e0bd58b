"""Lightning's `Trainer` in a run: what is logged is reported, and a checkpoint of the run has Lightning's own in it."""

import signal
import threading
from collections.abc import Callable, Collection
from functools import wraps
from typing import Any

from paceline import session
from paceline.errors import ArgumentError
from paceline.integrations.joining import begun_from, folder_for_files, join, missing, scored
from paceline.prepare.reproducibility import rng_state, set_rng_state
from paceline.rank_session import Session

try:
    import lightning.pytorch as pl
    from lightning.fabric.utilities.data import _set_sampler_epoch
    from lightning.pytorch.callbacks import Checkpoint as LightningCheckpoint
except ModuleNotFoundError as error:
    raise missing(error, __name__) from error

_FILE = "lightning.ckpt"
"""In a checkpoint's directory. Of a sharded strategy it is a folder."""
_RNG = "rng"
_CKPT_PATH = 4
"""The position of `ckpt_path` among the arguments of `fit`."""


class PacelineCallback(LightningCheckpoint):  # type: ignore[misc]
    """Reports what is logged, saves at the end of epochs, and ends the training well when the run is asked to stop:

        PacelineCallback().attach(trainer)
        trainer.fit(model)

    On all ranks; outside of a run nothing happens. `metrics` are the names of what to report, by default all that is
    logged. They are reported after each epoch, and with `report_every` also after so many optimizer steps.
    """

    # A `Checkpoint` of Lightning's, since these come last: when the model and all other callbacks are done with a step.

    best_model_path = ""
    """As Lightning asks every such callback: there is none of its own."""

    def __init__(self, metrics: Collection[str] | None = None, report_every: int | None = None, save_every: int = 1):
        """`save_every` counts epochs."""
        for name, value in (("report_every", report_every), ("save_every", save_every)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ArgumentError(f"PacelineCallback({name}={value!r}): expected a whole number from 1 on.")
        self._names = None if metrics is None else frozenset(metrics)
        self._report_every, self._save_every = report_every, save_every
        self._reported_at = 0
        self._has_left_epoch = False
        """In the middle of it, with all that there is saved."""
        self._sigterm: Any = None
        self._own_rng: Any = None
        """This rank's random generators, in a run that goes on."""

    def attach(self, trainer: pl.Trainer) -> None:
        """Join the trainer's callbacks, and let its `fit()` go on from the checkpoint that the run goes on from. In a
        run that goes on from none, `fit(ckpt_path=...)` is as it was."""
        trainer.callbacks.append(self)  # type: ignore[attr-defined]
        fit: Callable[..., Any] = trainer.fit

        @wraps(fit)
        def resuming(*args: Any, **kwargs: Any) -> Any:
            path = self.checkpoint_path
            if path is None:
                return fit(*args, **kwargs)
            return fit(*args[:_CKPT_PATH], **{**kwargs, "ckpt_path": path})

        trainer.fit = resuming  # type: ignore[method-assign]

    @property
    def checkpoint_path(self) -> str | None:
        """For `fit(ckpt_path=...)`: the file of what the run goes on from, None in one that begins."""
        running = session.current()
        checkpoint = None if running is None else begun_from(running, _FILE)
        return None if checkpoint is None or checkpoint.directory is None else str(checkpoint.directory / _FILE)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        running = session.current()
        if running is None:
            return
        remedy = "pass Trainer(strategy='ddp', devices=paceline.local_world_size()), and num_nodes on several machines"
        join(running, self, trainer.world_size, remedy)
        self._has_left_epoch = False
        self._sigterm = signal.getsignal(signal.SIGTERM)
        checkpoint = begun_from(running, _FILE)
        self._own_rng = None if checkpoint is None else (checkpoint.per_rank or {}).get(_RNG)
        if self._own_rng is not None:
            # Lightning keeps none. It asks for the first batch of an epoch before any hook of training.
            set_rng_state(self._own_rng)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._reported_at = trainer.global_step
        if self._own_rng is not None and _is_read_ahead(trainer):
            _read_anew(trainer, self._own_rng)
        is_main = threading.current_thread() is threading.main_thread()
        if session.in_worker() and is_main and self._sigterm is not None:
            # By now Lightning has a handler, which ends this rank in the middle of an epoch, and nothing is saved. With
            # the worker's own, all ranks stop at the same step.
            signal.signal(signal.SIGTERM, self._sigterm)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        running = session.current()
        if running is None:
            return
        if self._is_report_due(trainer):
            self._report(trainer, running, num_epochs=trainer.current_epoch)
        if session.should_stop():
            if not trainer.is_last_batch:  # else the end of the epoch is as always
                self._has_left_epoch = True
                self._save(trainer, running)
            _stop(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        running = session.current()
        if running is None or self._has_left_epoch:
            return
        self._report(trainer, running, num_epochs=trainer.current_epoch + 1)
        if (trainer.current_epoch + 1) % self._save_every == 0 or _is_last(trainer):
            self._save(trainer, running)

    def _is_report_due(self, trainer: pl.Trainer) -> bool:
        """Not at the end of an epoch, which is reported anyway, nor twice while gradients are accumulated."""
        step = trainer.global_step
        is_due = self._report_every is not None and step % self._report_every == 0
        return is_due and step != self._reported_at and not trainer.is_last_batch

    def _report(self, trainer: pl.Trainer, running: Session, num_epochs: int) -> None:
        """`num_epochs` are whole by now."""
        self._reported_at = trainer.global_step
        running.report({**self._metrics(trainer), **_where(trainer)})
        if trainer.max_epochs is not None and trainer.max_epochs > 0:
            running.report_progress(min(1.0, num_epochs / trainer.max_epochs))

    def _metrics(self, trainer: pl.Trainer) -> dict[str, Any]:
        known = trainer.callback_metrics
        return {name: value for name, value in known.items() if self._names is None or name in self._names}

    def _save(self, trainer: pl.Trainer, running: Session) -> None:
        with folder_for_files(running) as folder:
            trainer.save_checkpoint(folder / _FILE, weights_only=False)  # rank 0's path counts, and all wait
            metrics = {name: value.item() for name, value in self._metrics(trainer).items()}
            directory = folder if trainer.is_global_zero else None
            kept = scored(running, {**metrics, **_where(trainer)})
            running.save_checkpoint(kept, directory, {_RNG: rng_state()})


def _where(trainer: pl.Trainer) -> dict[str, int]:
    return {"epoch": trainer.current_epoch, "global_step": trainer.global_step}


def _is_last(trainer: pl.Trainer) -> bool:
    has_all_epochs = trainer.max_epochs is not None and 0 < trainer.max_epochs <= trainer.current_epoch + 1
    return bool(trainer.should_stop or has_all_epochs or 0 < trainer.max_steps <= trainer.global_step)


def _is_read_ahead(trainer: pl.Trainer) -> bool:
    """Whether processes of loaders, and of no loader that goes on where it was, have been asked for rows by now."""
    loaders = trainer.fit_loop._combined_loader.flattened
    goes_on = any(hasattr(loader, "load_state_dict") for loader in loaders)
    return not goes_on and any(getattr(loader, "num_workers", 0) > 0 for loader in loaders)


def _read_anew(trainer: pl.Trainer, rng: Any) -> None:
    """Lightning begins to read before it tells the samplers which epoch it is. Where processes load, they have rows of
    the first epoch then. Those that persist have drawn a seed, which they did not at the beginning of this epoch."""
    loop = trainer.fit_loop
    for loader in loop._combined_loader.flattened:
        _set_sampler_epoch(loader, loop.epoch_progress.current.processed)
    set_rng_state(rng)
    iter(loop._data_fetcher)


def _stop(trainer: pl.Trainer) -> None:
    """At this batch, whatever the least number of epochs is."""
    trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = None
    trainer.should_stop = True
