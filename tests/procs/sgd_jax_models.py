"""JAX models for the tests of DistributedSGD. Workers that train them import this, and JAX with it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sgd_rows import rows

from paceline.sgd import JaxModel


def loss_of(params, inputs, targets):
    return jnp.mean((inputs @ params["line"]["w"] + params["b"] - targets) ** 2)


class Averaging(JaxModel):
    """With statistics that change in every batch and are no weights, as those of batch norm."""

    def __init__(self):
        self.params, self.mean = {"w": jnp.zeros(1)}, jnp.zeros(2)

    def loss_and_grad(self):
        self.mean = self.mean + 1
        return 0.0, {"w": jnp.ones(1)}

    def get_optimizer(self):
        return optax.adam(0.1)

    def get_state(self):
        return {"mean": self.mean}

    def set_state(self, state):
        self.mean = state["mean"]


class JaxLine(JaxModel):
    def __init__(self, part, num_parts=4):
        weights = np.full((3, 1), part, np.float32)  # each replica would begin with weights of its own
        self.params = {"line": {"w": jnp.asarray(weights)}, "b": jnp.asarray(weights[0])}
        self.inputs, self.targets = rows(part, num_parts)
        self.compute = jax.jit(jax.value_and_grad(loss_of))

    def loss_and_grad(self):
        return self.compute(self.params, self.inputs, self.targets)

    def get_optimizer(self):
        return optax.sgd(0.1, momentum=0.9)

    def get_metrics(self):
        return {"num_rows": len(self.inputs)}

    def validate(self):
        return {"loss": self.compute(self.params, self.inputs, self.targets)[0]}
