"""The seam to a framework: one replica, which is one model with its data on one device. All of it is in a worker.

    made        replica_of(model)            what the model_creator has returned decides which kind
    once        slots                        which weights are trained; has to be the same in all replicas
    once        set_weights                  those of replica 0, so that all begin with the same
    each step   compute                      loss, metrics and gradients of the next batch
                apply                        the mean gradients of all replicas
    on demand   weights, state_dict, load_state_dict, validate, position

Arrays on this side of the seam are numpy's: strategies sum and send them without knowing whose they are. A new
framework is a new module with a class like these, and a line in the registry.
"""

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np

from paceline import registry
from paceline.errors import ArgumentError, ArgumentTypeError
from paceline.session import end_fork
from paceline.sgd.packing import Array, Slot
from paceline.workers.reports import plain


@dataclass
class Computed:
    loss: float
    gradients: list[Array | None]
    """In the order of the slots. Valid until the next `compute`: the memory may be the framework's own."""
    metrics: dict[str, Any] = field(default_factory=dict)


class Replica(Protocol):
    """See above for who asks what. A class of this kind is made with the user's model, and imports its framework when
    that is done, not before."""

    kind: ClassVar[str]
    model: Any
    """The user's object, which `foreach_model` hands out."""
    slots: Sequence[Slot]

    @classmethod
    def takes(cls, model: Any) -> bool:
        """Whether a model is of this kind, without importing the framework: who has such a model has imported it."""

    def compute(self) -> Computed:
        """The next batch; the weights stay as they are."""

    def apply(self, gradients: Sequence[Array | None]) -> None:
        """Let the optimizer make its step with these gradients. They are somebody else's memory: to be copied, and not
        written to. None leaves a weight alone."""

    def weights(self) -> dict[str, Array]:
        """Copies, by name: those that are trained and whatever else the model consists of, such as statistics."""

    def set_weights(self, weights: Mapping[str, Any]) -> None:
        """All of them. ArgumentError names what is missing, unknown or of another shape."""

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on and all replicas have in common: weights and optimizer, bit for bit, as a
        checkpoint holds it. A copy."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    def validate(self) -> dict[str, Any]:
        """What the model's `validate` returns, as plain values."""

    def position(self) -> Any:
        """What this replica has of its own, as a small value: where it is in its data. None if there is no such thing.
        Asked after each step."""

    def set_position(self, position: Any) -> None: ...


class OwnPosition:
    """The part that is the same for every framework: a model that reads data in an order of its own says where it is
    by `get_position()`, and goes on there with `set_position(position)`."""

    model: Any
    metrics_source: ClassVar[str] = "get_loss(), with its loss,"
    """Where metrics come from that the model has told with its loss."""

    def position(self) -> Any:
        get = getattr(self.model, "get_position", None)
        return None if get is None else get()

    def set_position(self, position: Any) -> None:
        if position is not None:
            self.model.set_position(position)

    def validate(self) -> dict[str, Any]:
        given = required(self.model, "validate", "validate()")()
        if not isinstance(given, Mapping):
            raise ArgumentTypeError(
                f"{type(self.model).__qualname__}.validate() has returned {given!r}; expected a dict of metrics."
            )
        return {name: plain(value) for name, value in given.items()}

    def _metrics(self, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """What the model tells of the batch it has just computed, and has told with its loss, as plain values."""
        get = getattr(self.model, "get_metrics", None)
        if get is None and not more:
            return {}
        told = (get() or {}) if get is not None else {}
        for given, source in ((told, "get_metrics()"), (more or {}, self.metrics_source)):
            if not isinstance(given, Mapping):
                raise ArgumentTypeError(
                    f"{type(self.model).__qualname__}.{source} has returned {given!r}; expected a dict of metrics."
                )
        return {name: plain(value) for name, value in {**told, **(more or {})}.items()}


class OwnState(OwnPosition):
    """The same for models that compute their own gradients: what else the next step depends on, a momentum or
    statistics, they give by `get_state()` and take by `set_state(state)`."""

    metrics_source: ClassVar[str] = "loss_and_grad(), as its third value,"

    def _own_state(self) -> dict[str, Any]:
        get = getattr(self.model, "get_state", None)
        return {} if get is None else {"own": copy.deepcopy(get())}

    def _check_state(self, state: Mapping[str, Any], *others: str) -> None:
        """ArgumentError if there is something in it that nobody here would take."""
        takes_own = callable(getattr(self.model, "set_state", None))
        expected = {"weights", *others, *(["own"] if takes_own else [])}
        if unknown := sorted(state.keys() - expected):
            what = "what its get_state() has given, and has no set_state()" if unknown == ["own"] else "another model's"
            raise ArgumentError(
                f"This state is not that of {type(self.model).__qualname__}: besides {', '.join(sorted(expected))} it "
                f"has {', '.join(unknown)}, which is {what}."
            )

    def _set_own_state(self, state: Mapping[str, Any]) -> None:
        if "own" in state:
            self.model.set_state(copy.deepcopy(state["own"]))


def loss_of(model: Any, owner_pid: int) -> Any:
    """What the model's `get_loss` gives for its next batch. A process that it has forked ends here, and not when all is
    computed: the threads that a backward pass needs were not forked with it, and collectives are its parent's."""
    given = required(model, "get_loss", "each step")()
    if os.getpid() != owner_pid:
        end_fork()
    return given


def loss_and_grad_of(model: Any, owner_pid: int) -> tuple[float, Any, dict[str, Any]]:
    """What a model that computes its own gradients tells of its next batch: loss, gradients, metrics. For forks, see
    above: to look at arrays may need threads too."""
    given = required(model, "loss_and_grad", "each step")()
    if os.getpid() != owner_pid:
        end_fork()
    if not isinstance(given, tuple) or len(given) not in (2, 3):
        raise ArgumentTypeError(
            f"{type(model).__qualname__}.loss_and_grad() has returned {type(given).__qualname__}; expected "
            "(loss, gradients), as from jax.value_and_grad, or (loss, gradients, metrics)."
        )
    loss, gradients, *rest = given
    try:
        number = float(loss)
    except OverflowError:
        raise ArgumentError(
            f"{type(model).__qualname__}.loss_and_grad() has returned a loss that is larger than any float."
        ) from None
    except (TypeError, ValueError):
        raise ArgumentTypeError(
            f"{type(model).__qualname__}.loss_and_grad() has returned {loss!r} as its loss; expected one number. Of "
            "value_and_grad(..., has_aux=True), return (loss, gradients, metrics)."
        ) from None
    return number, gradients, rest[0] if rest else {}


def gradient_array(slot: Slot, given: Any) -> Array:
    """In the dtype that it travels in, if it can: not what only looks like numbers, nor half of a complex one."""
    try:
        array = np.asarray(given)
    except ValueError:  # rows of unequal lengths
        raise ArgumentTypeError(f"The gradient of {slot.name} is {given!r}; expected an array.") from None
    if array.dtype.kind in "OUSMm" or (array.dtype.kind == "c" and np.dtype(slot.dtype).kind != "c"):
        raise ArgumentTypeError(
            f"The gradient of {slot.name} has values of type {array.dtype}, but travels as {slot.dtype}: expected "
            "numbers that fit."
        )
    if array.shape != slot.shape:
        raise ArgumentError(f"The gradient of {slot.name} is {list(array.shape)}, but the weight {list(slot.shape)}.")
    return array.astype(slot.dtype, copy=False)


def required(model: Any, name: str, needed_for: str) -> Callable[..., Any]:
    """A method of the user's model."""
    method = getattr(model, name, None)
    if not callable(method):
        raise ArgumentTypeError(f"{type(model).__qualname__} has no method {name}(), which {needed_for} needs.")
    found: Callable[..., Any] = method
    return found


def check_weights(known: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """ArgumentError if weights by name are not those of a model."""
    problems = [f"missing: {name}" for name in known if name not in given]
    problems += [f"unknown: {name}" for name in given if name not in known]
    shapes = {name: (list(known[name].shape), list(np.shape(given[name]))) for name in known if name in given}
    problems += [f"{name} is {theirs}, expected {ours}" for name, (ours, theirs) in shapes.items() if ours != theirs]
    if problems:
        raise ArgumentError(f"These weights are not those of this model; {'; '.join(problems)}.")


def replica_of(model: Any) -> Replica:
    """Of what a model_creator has returned: by its base class (TorchModel, NumpyModel …), else by what it has."""
    kinds = {name: registry.find("replica", name) for name in registry.names("replica")}
    named = kinds.get(str(getattr(model, "replica_kind", None)))
    for kind in [named] if named is not None else kinds.values():
        if kind is named or kind.takes(model):
            made: Replica = kind(model)
            return made
    raise ArgumentTypeError(
        f"model_creator has returned {type(model).__qualname__}, of which it is not known how to train it. "
        "Expected an object with get_loss() and get_optimizer(), as TorchModel and TFModel describe it, or with "
        "loss_and_grad() and either params, as JaxModel does, or get_weights() and set_weights(), as NumpyModel."
    )
