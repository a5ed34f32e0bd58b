"""A TensorFlow 2 model as a replica: its loss is computed eagerly under a tape, its optimizer is one of Keras or of
tf_keras."""

import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from paceline.errors import ArgumentError, ArgumentTypeError
from paceline.frameworks.tensorflow import rate_apart, variables_of
from paceline.sgd.packing import Array, Slot
from paceline.sgd.replica import Computed, OwnPosition, check_weights, loss_of, required

_PACKAGES = {"tensorflow", "keras", "tf_keras"}


class TensorflowReplica(OwnPosition):
    """See `Replica`."""

    kind: ClassVar[str] = "tensorflow"

    def __init__(self, model: Any):
        self.model, self._owner_pid = model, os.getpid()
        self.trained, every = _variables_of(model)
        if not self.trained:
            raise ArgumentTypeError(
                f"{type(model).__qualname__} has no variables yet. Expected a Keras model that is built (one with an "
                "Input layer, or after model.build(input_shape)) or a tf.Module as its attribute, or a method "
                "get_variables()."
            )
        self.optimizer = required(model, "get_optimizer", "each step")()
        if not hasattr(self.optimizer, "build") or not hasattr(self.optimizer, "apply_gradients"):
            raise ArgumentTypeError(
                f"The optimizer of {type(model).__qualname__} is {self.optimizer!r}; expected one of "
                "tf.keras.optimizers or tf_keras.optimizers, returned by get_optimizer()."
            )
        self.optimizer.build(self.trained)  # its variables are part of the state from the beginning on
        self._is_complete = callable(getattr(model, "get_variables", None))
        """Whether these are all weights that are meant: as the user says, or the first step has shown."""
        self._named = dict(zip(names_of(every), every, strict=True))
        names = {id(variable): name for name, variable in self._named.items()}
        self.slots: Sequence[Slot] = [
            Slot(names[id(variable)], tuple(variable.shape), _travels_as(variable)) for variable in self.trained
        ]

    @classmethod
    def takes(cls, model: Any) -> bool:
        if "tensorflow" not in sys.modules or not callable(getattr(model, "get_loss", None)):
            return False
        return bool(_owners(model))

    def compute(self) -> Computed:
        import tensorflow as tf

        with tf.GradientTape() as tape:
            given = loss_of(self.model, self._owner_pid)
            loss, metrics = given if isinstance(given, tuple) and len(given) == 2 else (given, {})
        if not tf.is_tensor(loss) or loss.shape.num_elements() != 1:  # not an array of numpy, which has a shape too
            what = f"a tensor of shape {loss.shape.as_list()}" if tf.is_tensor(loss) else repr(loss)
            raise ArgumentTypeError(
                f"{type(self.model).__qualname__}.get_loss() has returned {what}; expected a tensor with one element, "
                "or (loss, metrics)."
            )
        gradients = tape.gradient(loss, self.trained) if self._is_complete else self._first_gradients(tape, loss)
        if all(one is None for one in gradients):
            raise ArgumentTypeError(
                f"The loss of {type(self.model).__qualname__} depends on none of its weights: it was computed outside "
                "of get_loss(), or as numpy arrays."
            )
        return Computed(
            float(loss.numpy().item()),
            [_as_array(one) for one in gradients],
            self._metrics(metrics),
        )

    def _first_gradients(self, tape: Any, loss: Any) -> list[Any]:
        """What is in a list, say, or was not built when the replica was made, would stay as each replica has it."""
        known = {id(one.handle) for one in self.trained}
        others = [one for one in tape.watched_variables() if id(one.handle) not in known]
        gradients = tape.gradient(loss, [*self.trained, *others])
        missed = [one for one, found in zip(others, gradients[len(self.trained) :], strict=True) if found is not None]
        if missed:
            raise ArgumentTypeError(
                f"The loss of {type(self.model).__qualname__} depends on weights that nobody would train: "
                f"{', '.join(names_of(missed))}. Let model_creator build all models, and have each as an attribute; or "
                "say by get_variables() which weights are meant. What is not to be trained has trainable=False."
            )
        self._is_complete = True
        return list(gradients[: len(self.trained)])

    def apply(self, gradients: Sequence[Array | None]) -> None:
        import tensorflow as tf

        given = [
            (tf.cast(tf.constant(gradient), variable.dtype), variable)
            for gradient, variable in zip(gradients, self.trained, strict=True)
            if gradient is not None
        ]
        if given:
            self.optimizer.apply_gradients(given)

    def weights(self) -> dict[str, Array]:
        return {name: _array_of(variable) for name, variable in self._named.items()}

    def set_weights(self, weights: Mapping[str, Any]) -> None:
        check_weights(self._named, weights)
        for name, variable in self._named.items():
            _assign(variable, weights[name])

    def state_dict(self) -> dict[str, Any]:
        state = {"weights": self.weights(), "optimizer": [_array_of(one) for one in variables_of(self.optimizer)]}
        rate = rate_apart(self.optimizer)
        return state if rate is None else {**state, "learning_rate": _array_of(rate)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        own, given = variables_of(self.optimizer), state.get("optimizer", [])
        if [tuple(one.shape) for one in own] != [np.shape(one) for one in given]:
            raise ArgumentError(
                f"The state of the optimizer is not that of {type(self.optimizer).__qualname__}: it has {len(given)} "
                f"arrays, expected {len(own)} of other shapes."
            )
        self.set_weights(state["weights"])
        for variable, value in zip(own, given, strict=True):
            _assign(variable, value)
        if (rate := rate_apart(self.optimizer)) is not None and "learning_rate" in state:
            _assign(rate, state["learning_rate"])


def names_of(variables: Iterable[Any]) -> list[str]:
    """Keras counts the layers of a process, so that the second replica in it has `dense_1` where the first has `dense`.
    Without those numbers they agree; what is then alike is counted within the model."""
    names: dict[str, None] = {}
    counts: Counter[str] = Counter()
    for variable in variables:
        given = str(getattr(variable, "path", None) or variable.name).partition(":")[0]
        name = base = re.sub(r"_\d+(?=/|$)", "", given)
        number = counts[base]
        while number and (name := f"{base}_{number}") in names:  # of "w_1_2", a variable may have it
            number += 1
        names[name] = None
        counts.update({name, re.sub(r"_\d+$", "", name)})
    return list(names)


def _variables_of(model: Any) -> tuple[list[Any], list[Any]]:
    """Those that are trained, and all. Not the states of random numbers, which are each replica's own."""
    if callable(get := getattr(model, "get_variables", None)):
        every = list(get())
        return [one for one in every if one.trainable], every
    trained, every = [], []
    for owner in _owners(model):
        if hasattr(owner, "trainable_variables"):
            trained += list(owner.trainable_variables)
            every += list(owner.weights if hasattr(owner, "weights") else owner.variables)
        else:
            trained += [owner] if owner.trainable else []
            every.append(owner)
    return _each_once(trained), _each_once(every)


def _owners(model: Any) -> list[Any]:
    """What has variables, or is one: the object itself, or else attributes of it."""
    if _has_variables(model):
        return [model]
    return [one for one in getattr(model, "__dict__", {}).values() if _has_variables(one)]


def _has_variables(value: Any) -> bool:
    if isinstance(value, type) or not any(one.__module__.partition(".")[0] in _PACKAGES for one in type(value).__mro__):
        return False
    return hasattr(value, "trainable_variables") or (hasattr(value, "assign") and hasattr(value, "trainable"))


def _each_once(variables: Iterable[Any]) -> list[Any]:
    return list({id(one): one for one in variables}.values())


def _travels_as(variable: Any) -> str:
    dtype = _array_of(variable).dtype
    return "float32" if dtype.itemsize <= 2 or dtype.kind not in "fc" else dtype.name


def _as_array(gradient: Any) -> Array | None:
    import tensorflow as tf

    if gradient is None:
        return None
    dense = tf.convert_to_tensor(gradient)  # that of an embedding has only the rows that were used
    array: Array = dense.numpy()
    return array.astype(np.float32) if array.dtype.itemsize <= 2 else array


def _assign(variable: Any, value: Any) -> None:
    variable.assign(np.asarray(value).astype(_array_of(variable).dtype))


def _array_of(variable: Any) -> Array:
    """A copy."""
    return np.array(variable.numpy())
