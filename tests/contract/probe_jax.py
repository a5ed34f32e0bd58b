"""What the suites for backends have to know of jax."""

from probing import LR, MOMENTUM, Probe, rows

import paceline
from paceline import JaxConfig


def place():
    import jax

    return (jax.process_index(), jax.process_count()) if jax.distributed.is_initialized() else None


def meet():
    import jax
    import numpy as np

    return int(everybodys(np.array([jax.process_index() + 1])).sum())


def everybodys(rows):
    """An array of the rows that all processes have."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(jax.devices(), ("data",))
    return jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec("data")), rows)


def train(config):
    import jax
    import optax
    from jax import numpy as jnp

    x, y = (everybodys(part[paceline.world_rank() :: paceline.world_size()]) for part in rows())
    optimizer = optax.sgd(LR, MOMENTUM)
    weights, done = jnp.zeros(3), 0
    state = optimizer.init(weights)
    if checkpoint := paceline.load_checkpoint():
        weights, state, done = checkpoint["weights"], checkpoint["state"], checkpoint["step"]

    @jax.jit
    def descend(weights, state, x, y):
        loss, gradient = jax.value_and_grad(lambda weights: ((x @ weights - y) ** 2).mean())(weights)
        updates, state = optimizer.update(gradient, state)
        return loss, optax.apply_updates(weights, updates), state

    for step in range(done + 1, config["steps"] + 1):
        loss, weights, state = descend(weights, state, x, y)
        paceline.report(step=step, loss=loss)
        paceline.save_checkpoint(step=step, weights=weights, state=state)
        config["hook"](step)
    return weights.tolist()


def spoil():
    from jax.extend.backend import clear_backends

    clear_backends()


PROBE = Probe(config=JaxConfig, place=place, meet=meet, spoil=spoil, rejoins=False, train=train)
