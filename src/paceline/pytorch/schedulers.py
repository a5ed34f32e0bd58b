"""When learning-rate schedulers step. Pure: numbers in, how many steps out."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class StepMode(enum.Enum):
    """When a wrapped scheduler steps. It does so only after batches at which the optimizers step, too: with gradients
    aggregated over several batches, the steps of batches and epochs in between are made up for there."""

    STEP_EVERY_EPOCH = "epoch"
    STEP_EVERY_BATCH = "batch"
    STEP_EVERY_OPTIMIZER_STEP = "optimizer_step"
    MANUAL_STEP = "manual"


@dataclass(frozen=True)
class Moment:
    """The batch that was just trained on. `batch` counts all of them from 0, `epoch` is its epoch; `num_left` is how
    many batches of that epoch come after it, and `epoch_length` how many a whole one has: None if nobody knows."""

    batch: int
    epoch: int
    num_left: int | None
    epoch_length: int | None
    is_epoch_end: bool
    num_ended: int = 0
    """Epochs that ended since the optimizers stepped before: what counts where nobody knows the next end."""


def is_update(batch: int, aggregation_frequency: int) -> bool:
    """Whether optimizers step at this batch."""
    return (batch + 1) % aggregation_frequency == 0


def num_steps(mode: StepMode, frequency: int, moment: Moment, aggregation_frequency: int) -> int:
    """Steps of a scheduler after this batch."""
    if mode is StepMode.MANUAL_STEP or not is_update(moment.batch, aggregation_frequency):
        return 0
    if mode is StepMode.STEP_EVERY_BATCH:
        first = moment.batch + 1 - aggregation_frequency
        return (moment.batch + 1) // frequency - first // frequency
    if mode is StepMode.STEP_EVERY_OPTIMIZER_STEP:
        return int(((moment.batch + 1) // aggregation_frequency) % frequency == 0)
    if moment.num_left is None or moment.epoch_length is None:
        ended = moment.epoch + moment.is_epoch_end
        return ended // frequency - (ended - moment.num_ended) // frequency
    ended = moment.epoch + _num_epochs_to_end(moment.num_left, moment.epoch_length, aggregation_frequency)
    return ended // frequency - moment.epoch // frequency


def _num_epochs_to_end(num_left: int, epoch_length: int, aggregation_frequency: int) -> int:
    """Before the optimizers step again."""
    if num_left >= aggregation_frequency:
        return 0
    return 1 + (aggregation_frequency - 1 - num_left) // max(1, epoch_length)
