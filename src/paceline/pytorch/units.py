"""Lengths and periods of training: in batches, epochs or records. Values, and pure functions over them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from paceline.errors import ArgumentError, ArgumentTypeError


@dataclass(frozen=True)
class Lengths:
    """How far training is, over all ranks: `records` counts rows, those of all ranks together."""

    batches: int = 0
    epochs: int = 0
    records: int = 0

    def after(self, num_records: int, ends_epoch: bool) -> Lengths:
        return Lengths(self.batches + 1, self.epochs + ends_epoch, self.records + num_records)


@dataclass(frozen=True)
class TrainUnit:
    """One of `Batch`, `Epoch` and `Record`. As a period, a number n stands for every n-th, and a collection for these:
    `Batch([5, 30, 45])`. As a length it is a number."""

    value: int | Collection[int]
    counts: ClassVar[str] = ""
    """Which of the `Lengths` it is about."""

    def __post_init__(self) -> None:
        if type(self) is TrainUnit:
            raise ArgumentTypeError("TrainUnit is what Batch, Epoch and Record have in common: use one of these.")
        if isinstance(self.value, str | bytes | Mapping) or not isinstance(self.value, int | Collection):
            raise ArgumentTypeError(f"{self}: expected a whole number, or a collection of such numbers.")
        numbers = [self.value] if isinstance(self.value, int) else list(self.value)
        for number in numbers:
            if isinstance(number, bool) or not isinstance(number, int):
                raise ArgumentTypeError(f"{self}: {number!r} is no whole number.")
            if number < 1:
                raise ArgumentError(f"{self}: expected numbers from 1 on. To leave a period out, give None.")

    def __str__(self) -> str:
        return f"{type(self).__name__}({self.value!r})"

    def reached(self, lengths: Lengths) -> int:
        """Of what it counts, how much there is."""
        return int(getattr(lengths, self.counts))

    def is_due(self, before: Lengths, after: Lengths) -> bool:
        """As a period: whether the batch between these two has brought it about. Rows come many at a time: it is due
        when they have reached or passed the mark."""
        first, last = self.reached(before), self.reached(after)
        if first == last:
            return False
        if isinstance(self.value, int):
            return first // self.value < last // self.value
        return any(first < mark <= last for mark in self.value)

    def is_over(self, lengths: Lengths) -> bool:
        """As a length: whether there is nothing left of it."""
        assert isinstance(self.value, int)
        return self.reached(lengths) >= self.value

    def share(self, lengths: Lengths, epoch_share: float = 0.0) -> float:
        """As a length: how much of it is done, from 0 to 1. `epoch_share` is that of the epoch that is under way."""
        assert isinstance(self.value, int)
        done = self.reached(lengths) + (epoch_share if self.counts == "epochs" else 0.0)
        return min(1.0, done / self.value)


@dataclass(frozen=True)
class Batch(TrainUnit):
    """Batches: one of each rank is one."""

    counts: ClassVar[str] = "batches"


@dataclass(frozen=True)
class Epoch(TrainUnit):
    """Passes over the training data."""

    counts: ClassVar[str] = "epochs"


@dataclass(frozen=True)
class Record(TrainUnit):
    """Rows of the training data, of all ranks together."""

    counts: ClassVar[str] = "records"


def more(unit: TrainUnit, lengths: Lengths) -> TrainUnit:
    """So much further than `lengths`."""
    check_length("train_for()", unit)
    assert isinstance(unit.value, int)
    return type(unit)(unit.reached(lengths) + unit.value)


def check_length(name: str, unit: Any) -> None:
    if not isinstance(unit, TrainUnit):
        raise ArgumentTypeError(
            f"{name} is {unit!r}; expected a length: pytorch.Batch(100), pytorch.Epoch(3) or pytorch.Record(10_000)."
        )
    if not isinstance(unit.value, int):
        raise ArgumentTypeError(f"{name} is {unit}: a length is one number, as in {type(unit).__name__}(100).")


def check_period(name: str, unit: Any) -> None:
    if unit is not None and not isinstance(unit, TrainUnit):
        raise ArgumentTypeError(
            f"{name} is {unit!r}; expected a period: pytorch.Batch(100), pytorch.Epoch(1), pytorch.Record(10_000), or "
            "None."
        )
