"""Trains a trial: `Trainer(trial, context).fit(max_length=Epoch(10))`."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline import session
from paceline.checkpoints import Checkpoint, load
from paceline.errors import ArgumentError, ArgumentTypeError, TrainerStateError
from paceline.pytorch.context import PyTorchTrialContext
from paceline.pytorch.loop import Loop
from paceline.pytorch.plan import EVERY_100, Plan
from paceline.pytorch.profiled import Profiling
from paceline.pytorch.result import TrainResult
from paceline.pytorch.trial import Evaluation, PyTorchTrial
from paceline.pytorch.units import Batch, TrainUnit, more

logger = logging.getLogger(__name__)

_TRAINERS = "pytorch trainers"


@dataclass
class _Trainers:
    """Of one run, in this process."""

    num_begun: int = 0
    found: Mapping[str, Any] | None = None
    """What this run had saved before it was interrupted, until the Trainer comes that made it."""


class Trainer:
    """Every rank makes one, inside `pytorch.init()`."""

    def __init__(self, trial: PyTorchTrial, context: PyTorchTrialContext):
        Evaluation(trial)  # is it one, and can it be validated?
        if not isinstance(context, PyTorchTrialContext):
            raise ArgumentTypeError(
                f"Trainer() was given a {type(context).__name__} as its context; expected what pytorch.init() gives."
            )
        self._trial, self._context = trial, context
        self._loop: Loop | None = None
        self._done: Loop | None = None
        """That of the last `fit`, where the next one goes on."""
        self._profiling: Profiling | None = None

    def fit(
        self,
        checkpoint_period: TrainUnit | None = None,
        validation_period: TrainUnit | None = None,
        max_length: TrainUnit | None = None,
        reporting_period: TrainUnit | None = EVERY_100,
        average_aggregated_gradients: bool | None = None,
        aggregation_frequency: int | None = None,
        checkpoint_policy: str = "best",
        test_mode: bool = False,
        *,
        latest_checkpoint: str | os.PathLike[str] | Checkpoint | None = None,
        warm_start: str | os.PathLike[str] | Checkpoint | None = None,
        step_zero_validation: bool = False,
        metric: str | None = None,
        smaller_is_better: bool = True,
        profiling_enabled: bool = False,
    ) -> TrainResult:
        """Train until `max_length` is reached, in all: what was trained before a restart counts, and what an earlier
        `fit` of this Trainer has trained.

        Args:
            checkpoint_period, validation_period, reporting_period: `Batch`, `Epoch` or `Record`, counted from the
                beginning of training. At the end there is a validation and a checkpoint in any case.
            max_length: `Epoch(10)`, say.
            average_aggregated_gradients: whether gradients of several batches are averaged (default) or added up.
            aggregation_frequency: how many batches the optimizers wait for. Default: what `pytorch.init` was given.
            checkpoint_policy: what a validation means for checkpoints. "best": one is made if it is the best so far,
                and only the best and the latest stay; "all": one is made, and all stay; "none": none is made for it.
            test_mode: one batch of training, one of validation, one checkpoint.
            latest_checkpoint: a checkpoint of an earlier run, or its path, to go on from at its very batch. One that
                this run has made before a restart goes first.
            warm_start: a checkpoint to begin with: weights, optimizers, schedulers, callbacks, random numbers. Training
                starts at 0.
            step_zero_validation: validate before the first batch.
            metric, smaller_is_better: which validation metric "best" is about. Default: "validation_loss", "val_loss",
                "loss", or the only one there is.
            profiling_enabled: as `configure_profiler()` before it, which also says which batches.
        """
        if max_length is None and not test_mode:
            raise ArgumentError("fit() was given no max_length; expected a length, such as pytorch.Epoch(3).")
        plan = Plan(
            Batch(1) if max_length is None else max_length,
            checkpoint_period,
            validation_period,
            reporting_period,
            checkpoint_policy,
            metric,
            smaller_is_better,
            step_zero_validation,
        )
        self._aggregate(aggregation_frequency, average_aggregated_gradients)
        if profiling_enabled and self._profiling is None:
            self.configure_profiler()
        loop = self._begun(latest_checkpoint, warm_start)
        try:
            result = loop.run(plan.as_test(loop.lengths) if test_mode else plan)
            self._done = loop
            return result
        finally:
            self._loop = None
            loop.close()

    def train_for(self, length: TrainUnit, **options: Any) -> TrainResult:
        """Train so much further, and come back: for loops of your own around it. The options are those of `fit`; what
        begins the training counts in the first call. Everything stays open until the context is left, or `fit` is
        called, which goes on from here; after `fit` it goes on from there."""
        loop = self._loop
        if loop is None:
            started = {name: options.pop(name, None) for name in ("latest_checkpoint", "warm_start")}
            loop = self._loop = self._begun(**started)
            self._context.leaving.callback(self._leave)
        self._aggregate(options.pop("aggregation_frequency", None), options.pop("average_aggregated_gradients", None))
        return loop.run(Plan(more(length, loop.lengths), **options))

    def _leave(self) -> None:
        if self._loop is not None:
            self._loop.close()
            self._loop = None

    def configure_profiler(
        self,
        sync_timings: bool = True,
        enabled: bool = True,
        begin_on_batch: int = 0,
        end_after_batch: int | None = None,
        *,
        trace: bool = False,
    ) -> None:
        """Measure batches from `begin_on_batch` to `end_after_batch`: where their time goes, and what the machine does.
        The last call before `fit` counts. `trace` also records these batches with torch's own profiler: they are slower
        then, and the file of each rank grows with every batch, so name a few."""
        if end_after_batch is not None and end_after_batch < begin_on_batch:
            raise ArgumentError(
                f"configure_profiler(begin_on_batch={begin_on_batch}, end_after_batch={end_after_batch}): it would end "
                "before it begins."
            )
        self._profiling = (
            Profiling(self._context, sync_timings, begin_on_batch, end_after_batch, trace) if enabled else None
        )

    def _aggregate(self, frequency: int | None, averages: bool | None) -> None:
        optimization = self._context.optimization
        if frequency is not None:
            if isinstance(frequency, bool) or not isinstance(frequency, int) or frequency < 1:
                raise ArgumentError(f"aggregation_frequency={frequency!r}: expected a whole number, at least 1.")
            optimization.aggregation_frequency = frequency
        if averages is not None:
            optimization.averages = averages

    def _begun(self, latest_checkpoint: Any, warm_start: Any) -> Loop:
        if self._loop is not None:
            return self._loop
        if latest_checkpoint is not None and warm_start is not None:
            raise ArgumentError("fit() was given both latest_checkpoint, to go on, and warm_start, to begin: give one.")
        former, self._done = self._done, None
        if latest_checkpoint is not None or warm_start is not None:
            former = None
        number, checkpoint = (former.number, None) if former is not None else _resumed()
        is_warm = checkpoint is None and warm_start is not None
        given = warm_start if is_warm else latest_checkpoint
        if checkpoint is None and given is not None:
            checkpoint = _given("warm_start" if is_warm else "latest_checkpoint", given)
        loop = Loop(self._trial, self._context, self._profiling, number)
        try:
            if former is not None:
                loop.follow(former)
            else:
                loop.begin(checkpoint, is_warm)
        except BaseException:
            loop.close()
            raise
        return loop


def _given(name: str, value: Any) -> Mapping[str, Any]:
    if isinstance(value, Checkpoint):
        return value
    if not isinstance(value, str | os.PathLike):
        raise ArgumentTypeError(
            f"fit({name}=...) is a {type(value).__name__}; expected a checkpoint's path, or the checkpoint."
        )
    return load(os.fspath(value))


def _resumed() -> tuple[int, Mapping[str, Any] | None]:
    """Which Trainer of the run this is, from 0 on, and what it had saved before the run was interrupted. What another
    one has saved is not its own: one that had finished before trains again, and the other goes on when its turn comes.
    """
    running = session.current()
    if running is None:
        raise TrainerStateError("fit() is for the inside of `with pytorch.init() as context`, which has ended.")
    known = running.extras.get(_TRAINERS)
    if known is None:
        known = running.extras[_TRAINERS] = _Trainers(found=running.load_checkpoint())
    number, known.num_begun = known.num_begun, known.num_begun + 1
    if known.found is None:
        return number, None
    if known.found.get("trainer", 0) != number:
        logger.warning(
            "The run's checkpoint is not of its pytorch.Trainer number %d, which begins anew: use one Trainer for each "
            "run if that takes long.",
            number + 1,
        )
        return number, None
    found, known.found = known.found, None
    return number, found
