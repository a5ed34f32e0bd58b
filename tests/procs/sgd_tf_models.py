"""TensorFlow models for the tests of DistributedSGD. Workers that train them import this, and TensorFlow with it."""

import numpy as np
import tensorflow as tf
from sgd_rows import rows

from paceline.sgd import TFModel


class TFLine(TFModel):
    """With two layers of the same name, and a weight of which the loss does not depend."""

    def __init__(self, part, num_parts=4, keras=tf.keras):
        keras.utils.set_random_seed(part)  # each replica would begin with weights of its own
        layers = keras.layers
        self.model = keras.Sequential(
            [keras.Input((3,)), layers.Dense(4, "tanh"), layers.BatchNormalization(), layers.Dense(1)]
        )
        self.unused = tf.Variable(tf.ones(2), name="unused")
        self.keras = keras
        self.inputs, self.targets = map(tf.constant, rows(part, num_parts))

    def get_loss(self):
        return tf.reduce_mean((self.model(self.inputs, training=False) - self.targets) ** 2)

    def get_optimizer(self):
        return self.keras.optimizers.SGD(0.1, momentum=0.9)

    def get_metrics(self):
        return {"num_rows": len(self.inputs)}

    def validate(self):
        return {"mean": np.mean(self.model(self.inputs))}


def one(worker_idx, device_idx):
    return TFLine(2 * worker_idx + device_idx)
