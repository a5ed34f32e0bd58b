"""The loop of a trial: batches, and what is due after them."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import torch

import paceline
from paceline import session
from paceline.checkpoints.content.directory import files_of
from paceline.data.seeds import derived_seed
from paceline.prepare.reproducibility import rng_state
from paceline.prepare.rng import RandomStream
from paceline.profiling.clock import section
from paceline.pytorch import metrics as metric_values
from paceline.pytorch.callbacks import Callbacks
from paceline.pytorch.context import PyTorchTrialContext
from paceline.pytorch.feeding import TrainingFeed, source_of
from paceline.pytorch.kept import Kept, Score, found_in, states_of_ranks, storable
from paceline.pytorch.loader import check_loader, for_validation
from paceline.pytorch.metrics import TrainingMetrics, ValidationMetrics
from paceline.pytorch.plan import Due, Plan, reported_names
from paceline.pytorch.profiled import Profiling
from paceline.pytorch.result import Reason, TrainResult
from paceline.pytorch.schedulers import Moment
from paceline.pytorch.trial import Evaluation, PyTorchTrial
from paceline.pytorch.units import Lengths

logger = logging.getLogger(__name__)


class Loop:
    """One trial, from its first batch on: `begin`, then `run` as often as there is more to train, then `close`."""

    def __init__(
        self, trial: PyTorchTrial, context: PyTorchTrialContext, profiling: Profiling | None = None, number: int = 0
    ):
        """`number` counts the Trainers of a run, so that each knows its own checkpoints."""
        self.number = number
        self._trial, self._context, self._profiling = trial, context, profiling
        self._evaluation = Evaluation(trial)
        self._optimization = context.optimization
        self._ranks = context.distributed
        self.callbacks = Callbacks(trial.build_callbacks())
        self.lengths = Lengths()
        self._in_epoch = 0
        """Batches of the epoch that is under way."""
        self._metrics = TrainingMetrics(self.callbacks.listens("on_training_workload_end"))
        self._validated_at = self._saved_at = -1
        self._owes_validation = False
        """One was due when training was asked to end: it is made up for when it goes on."""
        self._training: dict[str, Any] = {}
        self._validation: dict[str, Any] = {}
        self._score = Score()
        self._latest: str | None = None
        self._leaving = ExitStack()
        if profiling is not None:
            self._leaving.callback(profiling.close)

    # --- from the beginning to the end --------------------------------------------------------------------------------

    def begin(self, checkpoint: Mapping[str, Any] | None, is_warm_start: bool) -> None:
        """Hooks, loaders, and what the checkpoint has. With a warm start that is weights, optimizers, schedulers,
        callbacks and random numbers, and training begins at its first batch."""
        self._optimization.check()
        kept = None if checkpoint is None else found_in(checkpoint)
        goes_on = kept is not None and not is_warm_start
        lengths = kept.lengths if kept is not None and goes_on else Lengths()
        seed = kept.seed if kept is not None and goes_on else self._context.seed
        self._start_up(lengths, seed, getattr(checkpoint, "path", None))
        if checkpoint is not None:
            self._restore(dict(checkpoint), states_of_ranks(checkpoint), goes_on)
        self.callbacks.tell("on_training_start")

    def follow(self, former: Loop) -> None:
        """Go on where another loop over the same trial has ended, in this process, with its callbacks."""
        self.callbacks, self._score = former.callbacks, former._score
        self._start_up(former.lengths, former._seed, former._latest)
        self._in_epoch, self._saved_at, self._latest = former._in_epoch, former._saved_at, former._latest
        self._validated_at, self._validation = former._validated_at, former._validation
        self._owes_validation = former._owes_validation
        feeds = [state for state in self._ranks.allgather(former._feed.state()) if state is not None]
        self._feed.restore(feeds, self._in_epoch > 0, former._feed.random_ahead())
        self.callbacks.tell("on_training_start")

    def _start_up(self, lengths: Lengths, seed: int, path: str | None) -> None:
        self._context.set_initial_batch(lengths.batches)
        for callback in self.callbacks:
            self._leaving.callback(callback.on_trial_shutdown)
            callback.on_trial_startup(lengths.batches, path)
        self._build_loaders(seed)
        self._seed, self.lengths = seed, lengths

    def _build_loaders(self, seed: int) -> None:
        place, is_own = session.place(), not self._context.shares_out
        loader = self._trial.build_training_data_loader()
        check_loader(loader, "build_training_data_loader()", is_own)
        self._feed = TrainingFeed(source_of(loader, self._trial, place, seed, is_own), self._ranks.allgather)
        self._leaving.callback(self._feed.close)
        held_out = self._trial.build_validation_data_loader()
        check_loader(held_out, "build_validation_data_loader()", is_own)
        is_shared = not is_own and not self._evaluation.is_whole
        self._held_out = for_validation(held_out, self._ranks.rank, self._ranks.size) if is_shared else held_out

    def _restore(self, state: dict[str, Any], own: Kept, goes_on: bool) -> None:
        self.callbacks.tell("on_checkpoint_load_start", state)
        self._optimization.restore(state)
        self.callbacks.restore(state.get("callbacks", {}))
        if goes_on:
            self._in_epoch = int(state.get("in_epoch", 0))
            self._validated_at = int(state.get("validated_at", -1))
            self._owes_validation = bool(state.get("owes_validation", False))
            self._validation = dict(state.get("validation", {}))
            self._score = Score.of(state.get("best"))
            self._saved_at = self.lengths.batches
            self._latest = own.path
            self._feed.restore(own.feeds, self._in_epoch > 0, own.random_ahead)
            if own.gradients:
                self._optimization.restore_gradients(own.gradients)
        own.restore_generators()

    def close(self) -> None:
        self._leaving.close()

    def run(self, plan: Plan) -> TrainResult:
        """Until the length is reached, or something else ends it."""
        self._score.rank(plan.smaller_is_better, keeps_best=plan.checkpoint_policy == "best")
        if plan.step_zero_validation and self.lengths.batches == 0 and self._validated_at < 0:
            self._validate(plan)
        if self._owes_validation:
            self._validate(plan)
        reason: Reason | None = None
        while reason is None and not plan.max_length.is_over(self.lengths):
            before = self.lengths
            self._train_batch()
            due, is_preempted = plan.due(before, self.lengths), paceline.should_stop()
            if due or is_preempted:
                reason = self._after(plan, due, is_preempted)
        if reason in (None, "finished"):
            reason = "finished"
            if self._validated_at != self.lengths.batches:
                self._validate(plan)
        if self._saved_at != self.lengths.batches:
            self._save()
        self._progress(plan)
        if reason == "stop requested":
            self._context.set_stop_requested(False)  # it was granted: who trains further wants to
        return self._result(reason)

    # --- one batch ----------------------------------------------------------------------------------------------------

    def _train_batch(self) -> None:
        context, lengths = self._context, self.lengths
        clock = self._optimization.clock = None if self._profiling is None else self._profiling.at(lengths.batches)
        with section(clock, "dataloader"):
            fetched = next(self._feed)
        with section(clock, "to_device"):
            batch = context.to_device(fetched.data) if context.moves_batches else fetched.data
        context.set_moment(lengths.batches, lengths.epochs, fetched.is_first, fetched.is_last)
        self._optimization.begin_batch(lengths.batches)
        if fetched.is_first:
            self.callbacks.tell("on_training_epoch_start", lengths.epochs)
        with section(clock, "forward"):
            returned = self._trial.train_batch(batch, lengths.epochs, lengths.batches)
        self._metrics.add(returned)
        if self._optimization.follows_batches:
            left, whole = fetched.num_left, self._feed.epoch_length
            self._optimization.end_batch(Moment(lengths.batches, lengths.epochs, left, whole, fetched.is_last))
        self.lengths = lengths.after(fetched.num_rows, fetched.is_last)
        self._in_epoch = 0 if fetched.is_last else self._in_epoch + 1
        if clock is not None:
            clock.step()
        if fetched.is_last:
            self.callbacks.tell("on_training_epoch_end", lengths.epochs)

    def _after(self, plan: Plan, due: Due, is_preempted: bool) -> Reason | None:
        """What is due, in its order. Gives why training ends, if it does."""
        with section(self._optimization.clock, "report"):
            is_stopped = self._report()
        reason: Reason | None = "preempted" if is_preempted else "stop requested" if is_stopped else None
        if reason is None and due.end:
            reason = "finished"
        is_due = (due.validation or due.end) and self._validated_at != self.lengths.batches
        self._owes_validation = is_due and is_preempted
        if is_due and not is_preempted:
            with section(self._optimization.clock, "validation"):
                self._validate(plan)
        if due.checkpoint and self._saved_at != self.lengths.batches:
            self._save()
        self._progress(plan)
        return reason

    def _report(self) -> bool:
        """Metrics since the last time, over all ranks. Gives whether one of them wants to stop."""
        means, batches = self._metrics.take()
        told = self._ranks.allgather((means, batches, self._context.get_stop_requested()))
        self._training = metric_values.mean_over_ranks([one for one, _, _ in told])
        self._training |= self._context.reducers.reduce(True, self._ranks.allgather)
        self._context.reducers.reset(is_training=True)
        self._tell(self._training)
        if self.callbacks.listens("on_training_workload_end"):
            over_ranks = metric_values.batches_over_ranks([each for _, each, _ in told])
            self.callbacks.tell("on_training_workload_end", dict(self._training), over_ranks)
        return any(wants for _, _, wants in told)

    def _tell(self, values: dict[str, Any]) -> None:
        where = {"batches": self.lengths.batches, "epochs": self.lengths.epochs, "records": self.lengths.records}
        paceline.report(**{**where, **values})
        if self._ranks.is_chief:
            logger.info("%s", _Told(where | values))

    def _progress(self, plan: Plan) -> None:
        length = self._feed.epoch_length
        share = plan.max_length.share(self.lengths, self._in_epoch / length if length else 0.0)
        self._context.core.train.report_progress(share)

    # --- validation ---------------------------------------------------------------------------------------------------

    def _validate(self, plan: Plan) -> None:
        self._context.reducers.reset(is_training=False)
        with self._optimization.evaluating():
            self.callbacks.tell("on_validation_start")
            # With random numbers of its own: training goes on as if it had not been.
            stream = RandomStream(derived_seed("validation", self._seed, self.lengths.batches, self._ranks.rank))
            with torch.no_grad(), stream.lent():
                values = self._whole(plan) if self._evaluation.is_whole else self._by_batch(plan)
        values |= self._context.reducers.reduce(False, self._ranks.allgather)
        self._context.reducers.reset(is_training=True)  # one may be for both: training begins to collect anew
        self.callbacks.tell("on_validation_end", values)
        values = self._ranks.broadcast(values)  # a hook may have changed them here only: all ranks decide alike
        self._validated_at, self._validation, self._owes_validation = self.lengths.batches, values, False
        self._tell(reported_names(values))
        is_best = self._score.take(plan.score_name(values), values)
        if plan.checkpoint_policy == "all" or (plan.checkpoint_policy == "best" and is_best):
            self._save()

    def _by_batch(self, plan: Plan) -> dict[str, Any]:
        self.callbacks.tell("on_validation_epoch_start")
        found, context = ValidationMetrics(), self._context
        batches = islice(iter(self._held_out), 1) if plan.is_test else self._held_out
        for index, given in enumerate(batches):
            batch = context.to_device(given) if context.moves_batches else given
            found.add(self._evaluation.batch(batch, index), self._trial.get_batch_length(batch))
        self.callbacks.tell("on_validation_epoch_end", found.outputs)
        return metric_values.over_ranks(self._ranks.allgather(found.partial(self._evaluation.reducers)))

    def _whole(self, plan: Plan) -> dict[str, Any]:
        values: dict[str, Any] = {}
        if self._ranks.is_chief:
            loader = list(islice(iter(self._held_out), 1)) if plan.is_test else self._held_out
            values = metric_values.plain(self._evaluation.whole(loader))
        return dict(self._ranks.broadcast(values))

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        with section(self._optimization.clock, "checkpoint"):
            self._make_checkpoint()

    def _make_checkpoint(self) -> None:
        state: dict[str, Any] = {}
        is_validated = self.lengths.batches == self._validated_at
        path = self._score.place(is_validated)
        with ExitStack() as stack:
            directory = None
            if self._ranks.is_chief:
                state = self._state()
                self.callbacks.tell("on_checkpoint_save_start", state)
                if self.callbacks.listens("on_checkpoint_write_end"):
                    written = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline_")))
                    self.callbacks.tell("on_checkpoint_write_end", written)
                    directory = written if any(files_of(written)) else None  # nobody has to write anything
            own = {"feed": self._feed.state(), "rng": rng_state(), "random_ahead": self._feed.random_ahead()}
            own["gradients"] = self._optimization.gradients(self.lengths.batches)
            self._score.save(state, directory, own, is_validated)
        self._saved_at, self._latest = self.lengths.batches, path
        if self._ranks.is_chief:
            logger.info("Saved %s", path)
        if self.callbacks.listens("on_checkpoint_upload_end"):
            self._score.settle()
            self.callbacks.tell("on_checkpoint_upload_end", path)

    def _state(self) -> dict[str, Any]:
        lengths, hparams = self.lengths, self._context.known_hparams()
        return {
            **self._optimization.state(),
            "callbacks": self.callbacks.state(),
            "batches": lengths.batches,
            "epochs": lengths.epochs,
            "records": lengths.records,
            "in_epoch": self._in_epoch,
            "seed": self._seed,
            "validated_at": self._validated_at,
            "owes_validation": self._owes_validation,
            "validation": storable(self._validation),
            "best": self._score.as_state(),
            "trainer": self.number,
            "trial": {
                "class": f"{type(self._trial).__module__}:{type(self._trial).__qualname__}",
                "hparams": None if hparams is None else storable(hparams),
            },
        }

    def _result(self, reason: Reason) -> TrainResult:
        self._score.settle()
        return TrainResult(
            reason,
            self.lengths.batches,
            self.lengths.epochs,
            self.lengths.records,
            self._latest,
            self._score.best_path,
            self._score.best,
            self._training,
            self._validation,
            self._context.core.run_dir,
            None if self._profiling is None else self._profiling.verdict(),
        )


class _Told:
    """Values as a line of a log; made only if somebody reads it."""

    def __init__(self, values: Mapping[str, Any]):
        self._values = values

    def __str__(self) -> str:
        return "  ".join(f"{name} {_short(value)}" for name, value in self._values.items())


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
