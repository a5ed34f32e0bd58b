"""One process: the script as it was."""

import jax
import numpy as np
import optax
from jax import numpy as jnp
from sklearn.datasets import load_digits


def train(config):
    images, labels = load_digits(return_X_y=True)
    images, labels = (images / 16).astype("f4"), labels.astype("i4")
    params = {"w": jnp.zeros((64, 10)), "b": jnp.zeros(10)}
    optimizer = optax.adam(config["lr"])
    state = optimizer.init(params)

    @jax.jit
    def descend(params, state, images, labels):
        def loss_fn(params):
            scores = images @ params["w"] + params["b"]
            return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()

        loss, gradients = jax.value_and_grad(loss_fn)(params)
        updates, state = optimizer.update(gradients, state)
        return loss, optax.apply_updates(params, updates), state

    for epoch in range(config["epochs"]):
        order = np.random.default_rng(epoch).permutation(len(images))
        for start in range(0, len(order) - config["batch_size"] + 1, config["batch_size"]):
            rows = order[start : start + config["batch_size"]]
            loss, params, state = descend(params, state, images[rows], labels[rows])
        print(f"epoch {epoch}: loss {loss:.4f}")
    return loss.item()


if __name__ == "__main__":
    print(train({"lr": 0.01, "batch_size": 64, "epochs": 5}))
