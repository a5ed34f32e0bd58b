"""Two workers: the same script with Paceline. The difference to jax_before.py is the documentation."""

import jax
import numpy as np
import optax
from jax import numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from sklearn.datasets import load_digits

import paceline


def train(config):
    images, labels = load_digits(return_X_y=True)
    images, labels = (images / 16).astype("f4"), labels.astype("i4")
    params = {"w": jnp.zeros((64, 10)), "b": jnp.zeros(10)}
    optimizer = optax.adam(config["lr"])
    state = optimizer.init(params)
    by_rows = NamedSharding(Mesh(jax.devices(), ("rows",)), PartitionSpec("rows"))

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
            rows = rows[paceline.world_rank() :: paceline.world_size()]
            batch = (jax.make_array_from_process_local_data(by_rows, part[rows]) for part in (images, labels))
            loss, params, state = descend(params, state, *batch)
        paceline.report(epoch=epoch, loss=loss)
    return loss.item()


if __name__ == "__main__":
    with paceline.Trainer(backend="jax", num_workers=2) as trainer:
        print(trainer.run(train, {"lr": 0.01, "batch_size": 64, "epochs": 5}))
