"""What a user writes: the parts of a training, without the loop."""

from __future__ import annotations

import abc
import enum
import inspect
from collections.abc import Mapping
from typing import Any

from paceline.errors import ArgumentError, ArgumentTypeError
from paceline.prepare.nesting import map_tensors
from paceline.pytorch.callbacks import PyTorchCallback

TorchData = Any
"""A batch: tensors, or containers of them."""


class Reducer(enum.Enum):
    """How the values of a validation metric become one."""

    AVG = "avg"
    SUM = "sum"
    MAX = "max"
    MIN = "min"


class PyTorchTrial(abc.ABC):
    """Wrap models, optimizers and schedulers with the context, in `__init__` or before; then say what one batch of
    training and one of validation are.

    Override exactly one of `evaluate_batch` and `evaluate_full_dataset`.
    """

    @abc.abstractmethod
    def train_batch(self, batch: TorchData, epoch_idx: int, batch_idx: int) -> Any:
        """Train on one batch: `context.backward(loss)`, `context.step_optimizer(optimizer)`. Return metrics as a dict,
        with the same keys each time, or the loss alone."""

    @abc.abstractmethod
    def build_training_data_loader(self) -> Any: ...

    @abc.abstractmethod
    def build_validation_data_loader(self) -> Any: ...

    def evaluate_batch(self, batch: TorchData, batch_idx: int) -> dict[str, Any]:
        """Metrics of one batch, with the same keys each time. `batch_idx` may be left out. No gradients are kept, and
        models are in evaluation mode."""
        raise NotImplementedError

    def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
        """Metrics of the whole validation set, at once. On rank 0."""
        raise NotImplementedError

    def evaluation_reducer(self) -> Reducer | dict[str, Reducer]:
        """How the values of `evaluate_batch` become one, for all metrics or for each. The mean is over rows."""
        return Reducer.AVG

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        """By name, under which their state is kept."""
        return {}

    def get_batch_length(self, batch: TorchData) -> int:
        """How many rows a batch has: by default the length of the first tensor or array in it."""
        return length_of(batch)


def length_of(batch: Any) -> int:
    found: list[int] = []

    def look(part: Any) -> Any:
        found.append(len(part))
        return part

    map_tensors(look, batch, is_leaf=lambda part: bool(getattr(part, "shape", ())))
    if not found:
        raise ArgumentError(
            f"How many rows a batch has cannot be told of a {type(batch).__name__} without tensors: override "
            "get_batch_length()."
        )
    return found[0]


class Evaluation:
    """Which way a trial validates."""

    def __init__(self, trial: PyTorchTrial):
        if not isinstance(trial, PyTorchTrial):
            raise ArgumentTypeError(
                f"The trial is a {type(trial).__name__}; expected an object of a class that derives from "
                "pytorch.PyTorchTrial."
            )
        by_batch = _is_overridden(trial, "evaluate_batch")
        self.is_whole = _is_overridden(trial, "evaluate_full_dataset")
        if by_batch == self.is_whole:
            both = "both of" if by_batch else "neither of"
            raise ArgumentError(
                f"{type(trial).__name__} has {both} evaluate_batch() and evaluate_full_dataset(); expected one."
            )
        self._trial = trial
        self._takes_index = by_batch and len(inspect.signature(trial.evaluate_batch).parameters) > 1

    def batch(self, batch: Any, index: int) -> dict[str, Any]:
        """What `evaluate_batch` says of it."""
        evaluate: Any = self._trial.evaluate_batch
        metrics = evaluate(batch, index) if self._takes_index else evaluate(batch)
        if not isinstance(metrics, Mapping):
            raise ArgumentTypeError(
                f"evaluate_batch() returned a {type(metrics).__name__}; expected a dict of metrics by name."
            )
        return dict(metrics)

    def whole(self, data_loader: Any) -> dict[str, Any]:
        """What `evaluate_full_dataset` says of it."""
        metrics = self._trial.evaluate_full_dataset(data_loader)
        if not isinstance(metrics, Mapping):
            raise ArgumentTypeError(
                f"evaluate_full_dataset() returned a {type(metrics).__name__}; expected a dict of metrics by name."
            )
        return dict(metrics)

    def reducers(self, names: list[str]) -> dict[str, Reducer]:
        given = self._trial.evaluation_reducer()
        if isinstance(given, Reducer):
            return dict.fromkeys(names, given)
        missing = [name for name in names if name not in given]
        if missing:
            raise ArgumentError(
                f"evaluation_reducer() has none for {missing[0]!r}; expected one for each of {', '.join(names)}."
            )
        return {name: given[name] for name in names}


def _is_overridden(trial: PyTorchTrial, name: str) -> bool:
    return getattr(type(trial), name) is not getattr(PyTorchTrial, name) or name in vars(trial)
