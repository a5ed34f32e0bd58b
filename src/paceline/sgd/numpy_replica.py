"""A model that computes its own gradients, as numpy arrays, as a replica."""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from paceline.errors import ArgumentError, ArgumentTypeError
from paceline.sgd.packing import Array, Slot
from paceline.sgd.replica import Computed, OwnState, check_weights, gradient_array, loss_and_grad_of


class NumpyReplica(OwnState):
    """See `Replica`. Its weights are a dict or a list of arrays, and its gradients are the same."""

    kind: ClassVar[str] = "numpy"

    def __init__(self, model: Any):
        self.model, self._owner_pid = model, os.getpid()
        _check_form(model)
        self.slots: Sequence[Slot] = [
            Slot(name, array.shape, _travels_as(array)) for name, array in self._arrays().items()
        ]
        self._names = {slot.name for slot in self.slots}

    @classmethod
    def takes(cls, model: Any) -> bool:
        return all(callable(getattr(model, name, None)) for name in ("loss_and_grad", "get_weights", "set_weights"))

    def compute(self) -> Computed:
        loss, gradients, metrics = loss_and_grad_of(self.model, self._owner_pid)
        if not isinstance(gradients, Iterable):
            raise ArgumentTypeError(
                f"loss_and_grad() has returned {gradients!r} as its gradients; expected what get_weights() gives: a "
                "dict or a list of arrays."
            )
        found = named(gradients)
        if unknown := found.keys() - self._names:
            weights = ", ".join(slot.name for slot in self.slots)
            raise ArgumentError(
                f"loss_and_grad() has gradients of what is no weight: {', '.join(sorted(unknown))}; the weights are "
                f"{weights}."
            )
        given = ((slot, found.get(slot.name)) for slot in self.slots)
        arrays = [None if gradient is None else gradient_array(slot, gradient) for slot, gradient in given]
        return Computed(loss, arrays, self._metrics(metrics))

    def apply(self, gradients: Sequence[Array | None]) -> None:
        """By the model's own `apply_gradients`, else plain gradient descent."""
        weights = self._arrays()
        by_name = {
            slot.name: None if gradient is None else gradient.astype(weights[slot.name].dtype)
            for slot, gradient in zip(self.slots, gradients, strict=True)
        }
        apply = getattr(self.model, "apply_gradients", None)
        if apply is not None:
            apply(self._like_weights(by_name))
            return
        rate = getattr(self.model, "learning_rate", None)
        if rate is None:
            raise ArgumentTypeError(
                f"{type(self.model).__qualname__} has neither apply_gradients() nor a learning_rate: expected "
                "one of them."
            )
        self.set_weights(
            {
                name: array if (gradient := by_name[name]) is None else (array - rate * gradient).astype(array.dtype)
                for name, array in weights.items()
            }
        )

    def weights(self) -> dict[str, Array]:
        return {name: array.copy() for name, array in self._arrays().items()}

    def set_weights(self, weights: Mapping[str, Any]) -> None:
        ours = self._arrays()
        check_weights(ours, weights)
        arrays = {name: np.array(weights[name], dtype=array.dtype) for name, array in ours.items()}
        self.model.set_weights(self._like_weights(arrays))

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights(), **self._own_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._check_state(state)
        self.set_weights(state["weights"])
        self._set_own_state(state)

    def _arrays(self) -> dict[str, Array]:
        return {name: np.asarray(array) for name, array in named(self.model.get_weights()).items()}

    def _like_weights(self, by_name: Mapping[str, Any]) -> Any:
        """In the form that the model has its weights in."""
        return dict(by_name) if isinstance(self.model.get_weights(), Mapping) else list(by_name.values())


def named(values: Any) -> dict[str, Any]:
    """A list by its numbers."""
    if type(values) is dict or isinstance(values, Mapping):  # nearly always the former, which is found out sooner
        return {str(name): value for name, value in values.items()}
    return {str(number): value for number, value in enumerate(values)}


def _check_form(model: Any) -> None:
    """ArgumentTypeError for any other: a lone array would count as a list of its rows, and come back as one."""
    given = model.get_weights()
    if not isinstance(given, Iterable) or hasattr(given, "__array__"):
        raise ArgumentTypeError(
            f"The weights of {type(model).__qualname__} are of type {type(given).__qualname__}; expected a dict or a "
            "list of arrays, also if there is only one."
        )
    for name, value in named(given).items():
        try:
            kind = np.asarray(value).dtype.kind
        except ValueError:  # rows of unequal lengths
            kind = "O"
        if kind in "OUSMm":
            raise ArgumentTypeError(
                f"The weight {name} of {type(model).__qualname__} is of type {type(value).__qualname__}; expected an "
                "array of numbers."
            )


def _travels_as(array: Array) -> str:
    is_small = array.dtype.itemsize <= 2 or array.dtype.kind not in "fc"
    return "float32" if is_small else array.dtype.name
