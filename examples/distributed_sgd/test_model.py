"""A convolutional classifier that makes its own mock images: residual blocks, and sizes for a machine without GPUs."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # read when TensorFlow is imported: what it did not find is no news

import tensorflow as tf

from paceline.sgd import TFModel

IMAGE_SIZE = 32
NUM_CLASSES = 1000


class TFBenchModel(TFModel):
    def __init__(self, batch=64, use_cpus=False):
        with tf.device("/CPU:0" if use_cpus else "/GPU:0"):
            shape = (batch, IMAGE_SIZE, IMAGE_SIZE, 3)
            self.images = tf.random.truncated_normal(shape, mean=127, stddev=60)  # the same in every step
            self.labels = tf.random.uniform((batch,), maxval=NUM_CLASSES, dtype=tf.int32)
            self.model = resnet()

    def get_loss(self):
        logits = self.model(self.images, training=True)
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(self.labels, logits))

    def get_optimizer(self):
        return tf.keras.optimizers.SGD(0.1)


def resnet(num_blocks=2, filters=16):
    layers = tf.keras.layers
    inputs = tf.keras.Input((IMAGE_SIZE, IMAGE_SIZE, 3))
    x = layers.Rescaling(1 / 60, offset=-127 / 60)(inputs)
    x = layers.Conv2D(filters, 7, strides=4, padding="same", activation="relu")(x)
    for _ in range(num_blocks):
        y = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
        y = layers.Conv2D(filters, 3, padding="same")(y)
        x = layers.ReLU()(layers.Add()([x, y]))
    return tf.keras.Model(inputs, layers.Dense(NUM_CLASSES)(layers.GlobalAveragePooling2D()(x)))
