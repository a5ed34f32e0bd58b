"""What the suites for backends have to know of TensorFlow."""

from probing import LR, MOMENTUM, Probe, rows

import paceline
from paceline import TensorflowConfig


def strategy():
    """As a script makes it. In a process that has made one before, it is of the same group."""
    import tensorflow as tf

    return tf.distribute.MultiWorkerMirroredStrategy()


def place():
    made = strategy()
    return made.cluster_resolver.task_id, made.num_replicas_in_sync


def meet():
    import tensorflow as tf

    made = strategy()
    mine = made.run(lambda: tf.constant(paceline.world_rank() + 1))
    return int(made.reduce("SUM", mine, axis=None))


def spoil():
    """A function that has its own idea of the cluster."""
    import os

    del os.environ["TF_CONFIG"]


def train(config):
    import tensorflow as tf

    made = strategy()
    x, y = (part[paceline.world_rank() :: paceline.world_size()] for part in rows())
    checkpoint = paceline.load_checkpoint() or {"step": 0, "weights": [0.0] * 3, "velocity": [0.0] * 3}
    with made.scope():
        weights = tf.Variable(checkpoint["weights"], dtype=tf.float32)
        optimizer = tf.keras.optimizers.SGD(LR, momentum=MOMENTUM)
        optimizer.build([weights])
    [velocity] = optimizer.momentums
    velocity.assign(checkpoint["velocity"])

    def descend():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((tf.linalg.matvec(x, weights) - y) ** 2) / len(rows()[0])
        optimizer.apply_gradients(zip(tape.gradient(loss, [weights]), [weights], strict=True))
        return loss

    @tf.function
    def one_step():
        return made.reduce("SUM", made.run(descend), axis=None)

    for step in range(checkpoint["step"] + 1, config["steps"] + 1):
        paceline.report(step=step, loss=one_step())
        paceline.save_checkpoint(step=step, weights=weights, velocity=velocity)
        config["hook"](step)
    return weights.numpy().tolist()


PROBE = Probe(
    config=TensorflowConfig, place=place, meet=meet, spoil=spoil, rejoins=False, serves_many=False, train=train
)
