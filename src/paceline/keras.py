"""A callback for Keras' `fit`: it reports, saves, and goes on after a failure. For Keras 2 (`tf_keras`, which
TensorFlow's strategy for several workers needs) and Keras 3, of which it imports neither.

    model.fit(dataset, epochs=10, callbacks=[paceline.keras.ReportCallback()])
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from paceline import session
from paceline.errors import ArgumentError, CheckpointError
from paceline.frameworks.tensorflow import rate_apart, variables_of
from paceline.workers.base import Place

logger = logging.getLogger(__name__)

_KEY = "keras"
"""What the checkpoints of the callback have their state under."""


class ReportCallback:
    """Reports the logs of every epoch, and of every `every`-th batch if asked; saves the weights, the state of the
    optimizer and the epoch when an epoch is over. When the first `fit` of a function begins that has a checkpoint to go
    on from, it restores these, and `fit` goes on with the epoch that follows.

    Give it to `fit` on every rank, with the same `every`. `save=False` only reports. `also` is called when it saves,
    and gives what else shall be in the checkpoint, by name.
    """

    async_safe = False  # Keras 3 may call others later than it trains
    _supports_tf_logs = False

    def __init__(
        self, *, every: int | None = None, save: bool = True, also: Callable[[], Mapping[str, Any]] | None = None
    ):
        if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise ArgumentError(f"ReportCallback(every={every!r}): expected a whole number of batches, at least 1.")
        self._every, self._save, self._also = every, save, also
        self.model: Any = None
        self.params: Mapping[str, Any] = {}
        self._epoch = 0
        self._loops_anew = False
        """Whether `fit` begins a loop over the data with every epoch, and ends it when there is no more."""
        self._num_batches, self._began_with = 0, 0
        """Of this epoch; and what the optimizer had counted before it."""
        self._counted: int | None = None
        """What it counts in a batch."""

    def set_params(self, params: Mapping[str, Any]) -> None:
        self.params = params

    def set_model(self, model: Any) -> None:
        self.model = model

    def on_train_begin(self, logs: Any = None) -> None:
        self._loops_anew = self.params.get("steps") is None
        current = session.current()
        if current is not None:
            _tell_if_apart(self.model, current.place)
        if current is None or not self._save or _KEY in current.extras:
            return  # also where this or another one has begun before: what there is to load now, that one has saved
        current.extras[_KEY] = True  # there, and not here: in this process, the next run may have the same callback
        if (checkpoint := session.load_checkpoint()) is not None and _KEY in checkpoint:
            state = checkpoint[_KEY]
            _restore(self.model, state)
            _begin_with(self.model, int(state["epoch"]) + 1)
        elif not self.model.built and current.place.world_rank == 0:
            logger.warning(
                "The model has no weights before the first batch, and nothing could go on from its checkpoints: give "
                "its first layer an input shape, or call model.build(...) before fit()."
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch, self._num_batches, self._counted = epoch, 0, None
        self._began_with = _count(self.model) if self._loops_anew else 0

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._num_batches += 1
        if self._loops_anew and self._num_batches == 1:
            self._counted = _count(self.model) - self._began_with
        if self._every is not None and self._num_batches % self._every == 0:
            session.report(epoch=self._epoch, batch=self._num_batches, **_numbers(self._batch_logs(logs)))

    def _batch_logs(self, logs: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """Keras 2 adds up those of all workers, where an epoch has their mean. Collective then, as the end of an epoch
        is."""
        strategy = getattr(self.model, "distribute_strategy", None)
        if strategy is None or strategy.num_replicas_in_sync == 1 or not hasattr(self.model, "get_metrics_result"):
            return logs
        found: Mapping[str, Any] = self.model.get_metrics_result()
        return found

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        if self._loops_anew:
            self._uncount()
        _end_epoch_of_data(is_over=self._loops_anew)
        session.report(epoch=epoch, **_numbers(logs))
        if self._save:
            state: dict[str, Any] = {**(self._also() if self._also is not None else {})}
            session.save_checkpoint(**state | {_KEY: {"epoch": epoch, **_state(self.model)}})
        if session.should_stop():
            self.model.stop_training = True

    def on_train_end(self, logs: Any = None) -> None:
        _begin_with(self.model, None)

    def _uncount(self) -> None:
        """Keras learns that there is no more data in the middle of a step, which the optimizer may have counted by
        then. A run that goes on learns it once more often than one that was not disturbed, and would go on with
        another count. Nothing but that one step is taken back: Keras on JAX, say, shows the count only when an epoch is
        over."""
        if self._counted:
            expected = self._began_with + self._counted * self._num_batches
            if _count(self.model) == expected + self._counted:
                _counter(self.model).assign(expected)

    # --- what Keras asks besides --------------------------------------------------------------------------------------

    def _implements_train_batch_hooks(self) -> bool:
        return True

    def _implements_test_batch_hooks(self) -> bool:
        return False

    def _implements_predict_batch_hooks(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("on_"):
            return _nothing
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def _tell_if_apart(model: Any, place: Place) -> None:
    """Whether each worker trains for itself, which is seldom meant."""
    strategy = getattr(model, "distribute_strategy", None)  # TensorFlow's; who trains with another says it elsewhere
    if place.world_rank == 0 and strategy is not None and strategy.num_replicas_in_sync < place.world_size:
        logger.warning(
            "%d workers each train a model of their own: this fit() knows of %d replica(s). Make the model in the "
            "scope of a tf.distribute.MultiWorkerMirroredStrategy, which takes tf_keras; fit() of Keras 3 trains one "
            "process, and a loop of your own trains several.",
            place.world_size,
            strategy.num_replicas_in_sync,
        )


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _numbers(logs: Mapping[str, Any] | None) -> dict[str, Any]:
    """A metric may also be an array: one number for each class, say."""
    return {name: value if getattr(value, "ndim", 0) else float(value) for name, value in (logs or {}).items()}


def _end_epoch_of_data(*, is_over: bool) -> None:
    """Keras may know by its count that there is no more, and not ask for it: for it, and so for a checkpoint, the epoch
    is over. Whoever went on in it would find nothing, and what TensorFlow repeats must not begin with that."""
    current = session.current()
    if current is not None:
        current.end_epoch_of_data(is_over=is_over)


# --- the state of a model ---------------------------------------------------------------------------------------------


def _state(model: Any) -> dict[str, Any]:
    state = {"weights": _values(_variables(model)), "optimizer": _values(_optimizer_variables(model))}
    rate = _rate(model)
    return state if rate is None else {**state, "learning_rate": rate.numpy()}


def _restore(model: Any, state: Mapping[str, Any]) -> None:
    if not model.built:
        raise CheckpointError(
            "The model has no weights yet into which a checkpoint could be loaded: give its first layer an input "
            "shape, or call model.build(...) before fit()."
        )
    with _scope(model):
        if model.optimizer is not None and not getattr(model.optimizer, "built", False):
            _build(model.optimizer, model.trainable_variables)
        _assign(_variables(model), state["weights"], "weights of the model")
        _assign(_optimizer_variables(model), state["optimizer"], "variables of its optimizer")
        if (rate := _rate(model)) is not None and "learning_rate" in state:
            rate.assign(state["learning_rate"])


def _build(optimizer: Any, variables: Sequence[Any]) -> None:
    """Let it make its variables, as its first step would."""
    if hasattr(optimizer, "build"):
        optimizer.build(variables)
    else:  # one of `tf_keras.optimizers.legacy`
        optimizer._create_all_weights(variables)


def _variables(model: Any) -> list[Any]:
    """Also the seeds of layers, which Keras 3 has among the variables; not the metrics, which begin anew."""
    metrics = {id(one) for one in getattr(model, "metrics_variables", ())}
    return [one for one in model.variables if id(one) not in metrics]


def _optimizer_variables(model: Any) -> list[Any]:
    return [] if model.optimizer is None else variables_of(model.optimizer)


def _rate(model: Any) -> Any:
    return None if model.optimizer is None else rate_apart(model.optimizer)


def _values(variables: Sequence[Any]) -> list[Any]:
    return [one.numpy() for one in variables]


def _assign(variables: Sequence[Any], values: Sequence[Any], what: str) -> None:
    shapes = [tuple(one.shape) for one in variables], [tuple(getattr(one, "shape", ())) for one in values]
    if shapes[0] != shapes[1]:
        raise CheckpointError(
            f"The checkpoint has other {what} than there are: their shapes are {shapes[1]} in it, and {shapes[0]} "
            "here. Go on with the model that was saved, or begin a new run."
        )
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def _counter(model: Any) -> Any:
    """By which the optimizer counts its steps; of one that gathers gradients, the batches that it has had."""
    shown = model.optimizer.iterations
    return shown if hasattr(shown, "assign") else model.optimizer._iterations


def _count(model: Any) -> int:
    return 0 if model.optimizer is None else int(_counter(model).numpy())


def _scope(model: Any) -> Any:
    strategy = getattr(model, "distribute_strategy", None)
    return nullcontext() if strategy is None else strategy.scope()


# --- where fit begins -------------------------------------------------------------------------------------------------


class _Counters:
    """As Keras 2 asks after `on_train_begin`."""

    def __init__(self, epoch: int):
        self._epoch = epoch

    def maybe_load_initial_counters_from_ckpt(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        return self._epoch, 0


def _begin_with(model: Any, epoch: int | None) -> None:
    """Let `fit` begin with this epoch; None: as it was told. Both do so for their own callback for restarts."""
    if hasattr(model, "_training_state"):
        model._training_state = None if epoch is None else _Counters(epoch)
    else:
        model._initial_epoch = epoch
