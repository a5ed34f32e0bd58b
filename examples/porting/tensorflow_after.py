"""Two workers: the same script with Paceline. The difference to tensorflow_before.py is the documentation."""

import tensorflow as tf
from sklearn.datasets import load_digits

import paceline
from paceline.data import from_numpy


def train(config):
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    data = paceline.get_data_shard().to_tf("image", "label", batch_size=config["batch_size"])
    with strategy.scope():
        model = tf.keras.Sequential([tf.keras.layers.Dense(128, "relu", input_shape=(64,)), tf.keras.layers.Dense(10)])
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(tf.keras.optimizers.Adam(config["lr"]), loss, metrics=["accuracy"])
    history = model.fit(data, epochs=config["epochs"], verbose=0, callbacks=[paceline.keras.ReportCallback()])
    return history.history["accuracy"][-1]


if __name__ == "__main__":
    images, labels = load_digits(return_X_y=True)
    digits = from_numpy({"image": images / 16, "label": labels}).random_shuffle()
    with paceline.Trainer(backend="tensorflow", num_workers=2) as trainer:
        print(trainer.run(train, {"lr": 0.01, "batch_size": 128, "epochs": 5}, dataset=digits))
