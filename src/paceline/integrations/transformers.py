"""Hugging Face's `transformers.Trainer` in a run: its logs are reports, its checkpoints are checkpoints of the run."""

import logging
from collections.abc import Callable, Collection, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

from paceline import session
from paceline.integrations.joining import begun_from, join, missing, scored, with_file
from paceline.rank_session import Session

try:
    import torch
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_utils import TrainOutput
except ModuleNotFoundError as error:
    raise missing(error, __name__) from error

logger = logging.getLogger(__name__)

_STATE_FILE = "trainer_state.json"
"""In every checkpoint of theirs."""
_RNG = "rng_state"


class _HasTrained(Exception):
    """There is no step left to make."""


class PacelineCallback(TrainerCallback):  # type: ignore[misc]
    """Reports what the Trainer logs, keeps what it saves as checkpoints of the run, and ends the training well when the
    run is asked to stop:

        PacelineCallback().attach(trainer)
        trainer.train()

    When it logs and saves is up to its own arguments. On all ranks; outside of a run nothing happens. `metrics` are the
    names of what to report, by default all that is logged.
    """

    def __init__(self, metrics: Collection[str] | None = None):
        self._names = None if metrics is None else frozenset(metrics)
        self._latest: dict[str, Any] = {}
        self._saved_at = 0
        """The step of the latest checkpoint: at the end of an epoch it may be asked for twice."""
        self._is_stopping = self._is_attached = False

    def attach(self, trainer: Trainer) -> None:
        """Join the trainer's callbacks, and let its `train()` go on from the checkpoint that the run goes on from. In a
        run that goes on from none, `train(resume_from_checkpoint=...)` is as it was."""
        trainer.add_callback(self)
        train: Callable[..., Any] = trainer.train

        @wraps(train)
        def resuming(resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
            try:
                return train(self.checkpoint_path or resume_from_checkpoint, *args, **kwargs)
            except _HasTrained:
                return _ended(trainer)

        trainer.train, self._is_attached = resuming, True  # type: ignore[method-assign]

    @property
    def checkpoint_path(self) -> str | None:
        """For `train(resume_from_checkpoint=...)`: the folder of what the run goes on from, None in one that begins."""
        running = session.current()
        checkpoint = None if running is None else begun_from(running, _STATE_FILE)
        if running is None or checkpoint is None or checkpoint.directory is None:
            return None
        own = (checkpoint.per_rank or {}).get(_RNG)
        folder = checkpoint.directory
        return str(folder if own is None else with_file(folder, _rng_name(running), own, running))

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        running = session.current()
        if running is None:
            return
        join(running, self, args.world_size, "on machines without GPUs, pass TrainingArguments(use_cpu=True)")
        self._is_stopping, self._saved_at = False, state.global_step
        checkpoint = begun_from(running, _STATE_FILE)
        if state.global_step > 0 and checkpoint is not None:
            self._latest = {**checkpoint, **self._latest}  # the next evaluation may come after the next checkpoint
            if self._is_attached and 0 < state.max_steps <= state.global_step:
                # Killed after its last step. Where that is not the end of an epoch, the Trainer would make another.
                raise _HasTrained
        if state.global_step == 0 and self.checkpoint_path is not None and state.is_world_process_zero:
            logger.warning(
                "This run goes on from %s, but trainer.train() begins anew. Write PacelineCallback().attach(trainer), "
                "or trainer.train(resume_from_checkpoint=callback.checkpoint_path).",
                self.checkpoint_path,
            )

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        metrics = {name: value for name, value in (logs or {}).items() if self._names is None or name in self._names}
        running = session.current()
        if running is None or not metrics:
            return
        self._latest |= metrics
        running.report({**metrics, "global_step": state.global_step})
        if state.max_steps > 0:
            running.report_progress(min(1.0, state.global_step / state.max_steps))

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        if session.should_stop():
            self._is_stopping = True
            control.should_training_stop = control.should_save = True
            control.should_evaluate = False  # there may be little time
        return control

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        if self._is_stopping:  # in the middle of it, and all is saved
            control.should_evaluate = control.should_save = False
        return control

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        running = session.current()
        if running is None or self._saved_at == state.global_step:
            return
        self._saved_at = state.global_step
        folder = Path(str(args.output_dir), f"checkpoint-{state.global_step}")
        _barrier()  # now each rank has put its own files there
        own = None
        if running.place.node_rank > 0 and (folder / _rng_name(running)).is_file():  # rank 0 may not see it
            own = {_RNG: (folder / _rng_name(running)).read_bytes()}
        kept = {**self._latest, "global_step": state.global_step, "epoch": state.epoch}
        running.save_checkpoint(scored(running, kept), folder if running.place.world_rank == 0 else None, own)


def _ended(trainer: Trainer) -> TrainOutput:
    """As the Trainer ends, of one that has loaded a checkpoint of its last step."""
    if trainer.args.load_best_model_at_end and trainer.state.best_model_checkpoint is not None:
        trainer._load_best_model()
    trainer.is_in_train = False
    trainer.control = trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)
    return TrainOutput(trainer.state.global_step, 0.0, {})


def _rng_name(running: Session) -> str:
    """Of the file for the random generators of this rank."""
    rank = f"_{running.place.world_rank}" if running.place.world_size > 1 else ""
    return f"{_RNG}{rank}.pth"


def _barrier() -> None:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.barrier()
