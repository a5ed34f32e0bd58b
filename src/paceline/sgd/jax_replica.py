"""A JAX model as a replica: its parameters are a pytree, it computes its own gradients, and optax makes the step."""

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from paceline.errors import ArgumentError, ArgumentTypeError
from paceline.sgd.packing import Array, Slot
from paceline.sgd.replica import Computed, OwnState, check_weights, gradient_array, loss_and_grad_of


class JaxReplica(OwnState):
    """See `Replica`. The model's `params` are replaced after each step: arrays of JAX do not change."""

    kind: ClassVar[str] = "jax"

    def __init__(self, model: Any):
        import jax

        self.model, self._owner_pid = model, os.getpid()
        leaves, self._form = jax.tree_util.tree_flatten_with_path(model.params)
        if not all(hasattr(leaf, "dtype") for _, leaf in leaves):  # numbers of Python
            leaves = [(path, jax.numpy.asarray(leaf)) for path, leaf in leaves]
            model.params = jax.tree_util.tree_unflatten(self._form, [leaf for _, leaf in leaves])
        if not leaves:
            raise ArgumentTypeError(f"{type(model).__qualname__}.params has no arrays: expected a pytree of weights.")
        self._names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
        self.slots: Sequence[Slot] = [
            Slot(name, tuple(np.shape(leaf)), _travels_as(leaf))
            for name, (_, leaf) in zip(self._names, leaves, strict=True)
        ]
        self._optimizer = model.get_optimizer() if hasattr(model, "get_optimizer") else None
        self._state = None
        if self._optimizer is not None:
            if not all(hasattr(self._optimizer, name) for name in ("init", "update")):  # flax.nnx has others
                raise ArgumentTypeError(
                    f"The optimizer of {type(model).__qualname__} is {self._optimizer!r}; expected one of optax, "
                    "returned by get_optimizer()."
                )
            self._state = self._optimizer.init(model.params)
            self._step = jax.jit(_optax_step, static_argnums=0)
        elif not hasattr(model, "apply_gradients") and getattr(model, "learning_rate", None) is None:
            raise ArgumentTypeError(
                f"{type(model).__qualname__} has neither get_optimizer() nor apply_gradients() nor a learning_rate: "
                "expected one of them."
            )

    @classmethod
    def takes(cls, model: Any) -> bool:
        jax = sys.modules.get("jax")
        if jax is None or not callable(getattr(model, "loss_and_grad", None)) or not hasattr(model, "params"):
            return False
        return any(isinstance(leaf, jax.Array) for leaf in jax.tree_util.tree_leaves(model.params))

    def compute(self) -> Computed:
        import jax

        loss, gradients, metrics = loss_and_grad_of(self.model, self._owner_pid)
        leaves, form = jax.tree_util.tree_flatten(gradients)
        shapes = [np.shape(leaf) for leaf in leaves]
        if form != self._form or shapes != [slot.shape for slot in self.slots]:
            raise ArgumentError(
                f"The gradients of {type(self.model).__qualname__}.loss_and_grad() are {form} of shapes {shapes}; "
                f"expected the form of params, {self._form} of shapes {[slot.shape for slot in self.slots]}."
            )
        arrays: list[Array | None] = [gradient_array(slot, leaf) for slot, leaf in zip(self.slots, leaves, strict=True)]
        return Computed(loss, arrays, self._metrics(metrics))

    def apply(self, gradients: Sequence[Array | None]) -> None:
        import jax

        # A step of optax is of all weights at once: what no replica has a gradient of gets zeros.
        leaves = [
            _copied(np.zeros(slot.shape, slot.dtype) if gradient is None else gradient, own)
            for slot, gradient, own in zip(self.slots, gradients, self._leaves(), strict=True)
        ]
        tree = jax.tree_util.tree_unflatten(self._form, leaves)
        model = self.model
        if self._optimizer is not None:
            model.params, self._state = self._step(self._optimizer, tree, self._state, model.params)
        elif hasattr(model, "apply_gradients"):
            model.apply_gradients(tree)
        else:
            rate = model.learning_rate
            model.params = jax.tree_util.tree_map(
                lambda weight, gradient: (weight - rate * gradient).astype(weight.dtype), model.params, tree
            )

    def weights(self) -> dict[str, Array]:
        return {name: np.array(leaf) for name, leaf in zip(self._names, self._leaves(), strict=True)}

    def set_weights(self, weights: Mapping[str, Any]) -> None:
        import jax

        own = dict(zip(self._names, self._leaves(), strict=True))
        check_weights(own, weights)
        leaves = [_copied(weights[name], leaf) for name, leaf in own.items()]
        self.model.params = jax.tree_util.tree_unflatten(self._form, leaves)

    def state_dict(self) -> dict[str, Any]:
        import jax

        state = {"weights": self.weights(), **self._own_state()}
        if self._state is not None:
            state["optimizer"] = [_as_numbers(leaf) for leaf in jax.tree_util.tree_leaves(self._state)]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        import jax

        self._check_state(state, *(["optimizer"] if self._state is not None else []))
        leaves = None
        if self._state is not None:
            own, form = jax.tree_util.tree_flatten(self._state)
            given = state.get("optimizer", [])
            shapes = [[list(np.shape(one)) for one in arrays] for arrays in (given, map(_as_numbers, own))]
            if shapes[0] != shapes[1]:
                raise ArgumentError(
                    "The state of the optimizer is not that of this model: its arrays have the shapes "
                    f"{shapes[0]}, expected {shapes[1]}."
                )
            leaves = [_of_numbers(value, leaf) for value, leaf in zip(given, own, strict=True)]
        self.set_weights(state["weights"])
        if leaves is not None:
            self._state = jax.tree_util.tree_unflatten(form, leaves)
        self._set_own_state(state)

    def _leaves(self) -> list[Any]:
        import jax

        return list(jax.tree_util.tree_leaves(self.model.params))


def _optax_step(optimizer: Any, gradients: Any, state: Any, params: Any) -> tuple[Any, Any]:
    import optax

    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state


def _copied(value: Any, like: Any) -> Any:
    """An array of JAX of that dtype. Not `asarray`, which may go on using the memory that it is given."""
    import jax.numpy as jnp

    return jnp.array(value, dtype=like.dtype)


def _as_numbers(leaf: Any) -> Array:
    """A copy. Of a random key of optax's: what it is made of."""
    import jax

    return np.array(jax.random.key_data(leaf) if _is_key(leaf) else leaf)


def _of_numbers(value: Any, like: Any) -> Any:
    import jax

    if _is_key(like):
        return jax.random.wrap_key_data(jax.numpy.array(value), impl=jax.random.key_impl(like))
    return _copied(value, like)


def _is_key(leaf: Any) -> bool:
    import jax

    return isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _travels_as(leaf: Any) -> str:
    dtype = np.asarray(leaf).dtype
    return "float32" if dtype.itemsize <= 2 or dtype.kind not in "fc" else dtype.name
