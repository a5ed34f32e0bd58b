"""What users derive their models from, or write something like: a model that has its own data.

The base classes hold no more than names and defaults. An object of any other class with the same methods will do.
"""

from collections.abc import Mapping
from typing import Any, ClassVar


class TorchModel:
    """A PyTorch model with its data.

    >>> class Linear(TorchModel):
    ...     def __init__(self, inputs, targets):
    ...         self.module = torch.nn.Linear(4, 1)
    ...         self.inputs, self.targets = inputs, targets
    ...
    ...     def get_loss(self):
    ...         return torch.nn.functional.mse_loss(self.module(self.inputs), self.targets)
    ...
    ...     def get_optimizer(self):
    ...         return torch.optim.SGD(self.module.parameters(), lr=0.1)

    The `nn.Module` is `self.module`, or the object itself if it derives from that too. Further methods, if you write
    them: `validate()` → dict; `get_scheduler()` → a learning rate scheduler, which makes a step after each of the
    optimizer's; `get_position()` and `set_position(position)`: where it is in its data.
    """

    replica_kind: ClassVar[str] = "torch"
    module: Any

    def get_loss(self) -> Any:
        """The loss of the next batch: a tensor with one element, of which gradients can be had. Called once a step."""
        raise NotImplementedError(f"{type(self).__qualname__} has to define get_loss().")

    def get_optimizer(self) -> Any:
        """Called once. What it optimizes is what is trained."""
        raise NotImplementedError(f"{type(self).__qualname__} has to define get_optimizer().")

    def get_metrics(self) -> Mapping[str, Any]:
        """Of the batch whose loss was just computed."""
        return {}


class NumpyModel:
    """A model that knows its own gradients.

    >>> class Line(NumpyModel):
    ...     learning_rate = 0.1
    ...
    ...     def __init__(self, inputs, targets):
    ...         self.weights = {"slope": np.zeros(1)}
    ...         self.inputs, self.targets = inputs, targets
    ...
    ...     def loss_and_grad(self):
    ...         error = self.inputs * self.weights["slope"] - self.targets
    ...         return (error**2).mean(), {"slope": np.array([(2 * error * self.inputs).mean()])}

    For another optimizer than plain gradient descent, write `apply_gradients(gradients)`; and `get_state()`,
    `set_state(state)` if it has a state, such as a momentum. `validate`, `get_position` and `set_position` as for
    TorchModel.
    """

    replica_kind: ClassVar[str] = "numpy"
    learning_rate: float = 0.01
    weights: dict[str, Any]

    def loss_and_grad(self) -> tuple[Any, Any]:
        """Of the next batch: the loss, and the gradients in the form of the weights."""
        raise NotImplementedError(f"{type(self).__qualname__} has to define loss_and_grad().")

    def get_weights(self) -> Any:
        """A dict or a list of arrays."""
        return self.weights

    def set_weights(self, weights: Any) -> None:
        self.weights = weights

    def get_metrics(self) -> Mapping[str, Any]:
        """Of the batch whose loss was just computed."""
        return {}


class TFModel:
    """A TensorFlow 2 model with its data.

    >>> class Linear(TFModel):
    ...     def __init__(self, inputs, targets):
    ...         self.model = tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(1)])
    ...         self.inputs, self.targets = inputs, targets
    ...
    ...     def get_loss(self):
    ...         return tf.reduce_mean((self.model(self.inputs, training=True) - self.targets) ** 2)
    ...
    ...     def get_optimizer(self):
    ...         return tf.keras.optimizers.SGD(0.1)

    Its weights are those of the Keras models, tf.Modules and tf.Variables that are attributes of it, or what
    `get_variables()` returns. The models have to be built. `validate`, `get_position` and `set_position` as for
    TorchModel.
    """

    replica_kind: ClassVar[str] = "tensorflow"

    def get_loss(self) -> Any:
        """The loss of the next batch: a tensor with one element. Called once a step, under a tape; what takes long may
        be a `tf.function`."""
        raise NotImplementedError(f"{type(self).__qualname__} has to define get_loss().")

    def get_optimizer(self) -> Any:
        """Called once: an optimizer of Keras, or of tf_keras."""
        raise NotImplementedError(f"{type(self).__qualname__} has to define get_optimizer().")

    def get_metrics(self) -> Mapping[str, Any]:
        """Of the batch whose loss was just computed."""
        return {}


class JaxModel:
    """A JAX model with its data. Its weights are `params`, a pytree, which is replaced after each step.

    >>> class Linear(JaxModel):
    ...     def __init__(self, inputs, targets):
    ...         self.params = {"w": jnp.zeros((4, 1)), "b": jnp.zeros(1)}
    ...         self.inputs, self.targets = inputs, targets
    ...         self.compute = jax.jit(jax.value_and_grad(mean_squared_error))
    ...
    ...     def loss_and_grad(self):
    ...         return self.compute(self.params, self.inputs, self.targets)
    ...
    ...     def get_optimizer(self):
    ...         return optax.adam(0.1)

    Without `get_optimizer` it is plain gradient descent with `learning_rate`, or what `apply_gradients(gradients)` does
    to `params`. `validate`, `get_position` and `set_position` as for TorchModel.
    """

    replica_kind: ClassVar[str] = "jax"
    learning_rate: float = 0.01
    params: Any

    def loss_and_grad(self) -> tuple[Any, ...]:
        """Of the next batch: the loss, and the gradients in the form of `params`; metrics too, if you like."""
        raise NotImplementedError(f"{type(self).__qualname__} has to define loss_and_grad().")

    def get_metrics(self) -> Mapping[str, Any]:
        """Of the batch whose loss was just computed."""
        return {}
