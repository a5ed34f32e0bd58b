"""Metrics of many batches and many ranks as one: of training, of validation, and by reducers of the user's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from paceline.errors import ArgumentError, ArgumentTypeError
from paceline.pytorch.trial import Reducer

_FOLD_AT = 100
"""Batches whose metrics are kept as they are: no device is waited for before that."""


class TrainingMetrics:
    """Of the batches since the last report. Only what a callback asks for is kept batch by batch."""

    def __init__(self, keeps_batches: bool):
        self._keeps_batches = keeps_batches
        self._waiting: list[dict[str, Any]] = []
        self._batches: list[dict[str, Any]] = []
        self._sums: dict[str, Any] = {}
        self._count = 0
        self._names: list[str] | None = None

    def add(self, returned: Any) -> None:
        """What `train_batch` has returned. Nothing is computed yet."""
        if isinstance(returned, torch.Tensor):
            returned = {"loss": returned}
        elif not isinstance(returned, Mapping):
            raise ArgumentTypeError(
                f"train_batch() returned a {type(returned).__name__}; expected a dict of metrics by name, or the loss."
            )
        kept = {name: _own(value) for name, value in returned.items()}
        if self._names is None:
            self._names = list(kept)
        elif kept.keys() != set(self._names):
            raise ArgumentError(
                f"train_batch() returned the metrics {', '.join(kept)}, and {', '.join(self._names)} before: expected "
                "the same each time."
            )
        self._waiting.append(kept)
        if len(self._waiting) >= _FOLD_AT:
            self._fold()

    def _fold(self) -> None:
        waiting, self._waiting = self._waiting, []
        columns = {name: _numbers([one[name] for one in waiting]) for name in (waiting[0] if waiting else ())}
        for name, values in columns.items():
            self._sums[name] = self._sums.get(name, 0.0) + _sum(values)
        self._count += len(waiting)
        if self._keeps_batches:
            self._batches += [
                {name: values[index] for name, values in columns.items()} for index in range(len(waiting))
            ]

    def take(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The mean of each, None where there is no such thing, and the batches; and begin anew."""
        self._fold()
        means = {
            name: None if total is None or not self._count else total / self._count
            for name, total in self._sums.items()
        }
        taken = means, self._batches
        self._sums, self._batches, self._count, self._names = {}, [], 0, None
        return taken


def _own(value: Any) -> Any:
    """As it is now: a parameter or a buffer, or a part of one, will have changed when it is looked at. A loss will not,
    and it is spared the copy."""
    if isinstance(value, torch.Tensor):
        made = value.detach()
        return made.clone() if value.grad_fn is None or value._is_view() else made
    return value.copy() if isinstance(value, np.ndarray) else value


def _numbers(values: Sequence[Any]) -> list[Any]:
    """As numpy has them: numbers or arrays. Tensors come from their device at once."""
    if all(isinstance(value, torch.Tensor) for value in values) and len({value.shape for value in values}) == 1:
        return (
            list(torch.stack(list(values)).double().cpu().numpy())
            if values[0].dtype != torch.bool
            else [float(value) for value in values]
        )
    return [_array(value) if isinstance(value, torch.Tensor) else value for value in values]


def _array(tensor: torch.Tensor) -> Any:
    """A copy. numpy has no bfloat16."""
    found = tensor.detach()
    return (found.float() if found.dtype is torch.bfloat16 else found).cpu().numpy().copy()


def _sum(values: Sequence[Any]) -> Any:
    """None for what has no sum: texts, nothing, arrays of different shapes."""
    if any(value is None or isinstance(value, str | bytes) for value in values):  # numpy makes numbers of them
        return _NO_SUM
    try:
        arrays = [np.asarray(value, dtype=np.float64) for value in values]
        total = np.sum(arrays, axis=0)
    except (TypeError, ValueError):
        return _NO_SUM
    return float(total) if total.shape == () else total


class _NoSum:
    """Stays what it is, whatever is added."""

    def __add__(self, other: Any) -> _NoSum:
        return self

    __radd__ = __add__

    def __truediv__(self, other: Any) -> None:
        return None


_NO_SUM = _NoSum()


def mean_over_ranks(means: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Ranks have equally many batches. A rank that has no value does not count."""
    made: dict[str, Any] = {}
    for name in means[0]:
        values = [one[name] for one in means if one.get(name) is not None]
        made[name] = _sum(values) / len(values) if values else None
    return made


def batches_over_ranks(by_rank: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    return [mean_over_ranks(ranks) if len(ranks) > 1 else dict(ranks[0]) for ranks in zip(*by_rank, strict=True)]


def reduced(reducer: Reducer, values: Sequence[Any], weights: Sequence[float]) -> Any:
    """One value of many. Only the mean looks at the weights."""
    arrays = np.asarray([np.asarray(value, dtype=np.float64) for value in values])
    if reducer is Reducer.AVG:
        made = np.average(arrays, axis=0, weights=weights) if sum(weights) else np.full(arrays.shape[1:], math.nan)
    else:
        made = getattr(np, reducer.value)(arrays, axis=0)
    return float(made) if np.shape(made) == () else made


def plain(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Without tensors."""
    return {name: _array(value) if isinstance(value, torch.Tensor) else value for name, value in metrics.items()}


class ValidationMetrics:
    """Of this rank's batches."""

    def __init__(self) -> None:
        self.outputs: list[dict[str, Any]] = []
        self.lengths: list[int] = []

    def add(self, metrics: Mapping[str, Any], num_rows: int) -> None:
        if self.outputs and metrics.keys() != self.outputs[0].keys():
            raise ArgumentError(
                f"evaluate_batch() returned the metrics {', '.join(metrics)}, and {', '.join(self.outputs[0])} before: "
                "expected the same each time."
            )
        missing = [name for name, value in metrics.items() if value is None]
        if missing:
            raise ArgumentError(f"evaluate_batch() returned None for {missing[0]!r}; expected a number or an array.")
        self.outputs.append(plain(metrics))
        self.lengths.append(num_rows)

    def partial(self, reducers_of: Callable[[list[str]], dict[str, Reducer]]) -> Partial | None:
        """One value of each for this rank; None if it had no batch."""
        if not self.outputs:
            return None
        reducers = reducers_of(list(self.outputs[0]))
        values = {
            name: _reduced_by_name(name, reducers[name], [one[name] for one in self.outputs], self.lengths)
            for name in reducers
        }
        return Partial(values, sum(self.lengths), reducers)


class Partial(NamedTuple):
    """What one rank has of a validation."""

    values: dict[str, Any]
    num_rows: int
    reducers: dict[str, Reducer]


def over_ranks(parts: Sequence[Partial | None]) -> dict[str, Any]:
    """The metrics of a validation, of what each rank has of it."""
    there = [part for part in parts if part is not None]
    if not there:
        raise ArgumentError("The validation data is empty: there was nothing to evaluate.")
    weights = [float(part.num_rows) for part in there]
    names = there[0].reducers
    return {
        name: _reduced_by_name(name, reducer, [part.values[name] for part in there], weights)
        for name, reducer in names.items()
    }


def _reduced_by_name(name: str, reducer: Reducer, values: Sequence[Any], weights: Sequence[float]) -> Any:
    try:
        return reduced(reducer, values, weights)
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            f"The values of the metric {name!r} of all batches cannot be put together: {error}. Expected numbers, or "
            "arrays of one shape; wrap a reducer for anything else."
        ) from error
