"""Train a classifier of handwritten digits with JAX, flax and optax, on two workers.

python examples/jax_digits.py [--workers 2] [--epochs 8] [--results demo_results]
"""

import argparse
import os

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from sklearn.datasets import load_digits

import paceline
from paceline import LocalEngine, Trainer
from paceline.data import from_numpy


class Classifier(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(64, 128, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.out = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, images):
        return self.out(self.dropout(nnx.relu(self.hidden(images))))


def train_digits(config):
    model = Classifier(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(config["lr"]), wrt=nnx.Param)
    both, done = {"model": model, "optimizer": optimizer}, 0
    if checkpoint := paceline.load_checkpoint():
        for name, part in both.items():
            state = nnx.state(part)
            nnx.replace_by_pure_dict(state, checkpoint[name])
            nnx.update(part, state)
        done = checkpoint["epoch"]

    # Each process has some rows of a batch, and jax makes one array of them: the loss is that of the whole batch.
    rows = NamedSharding(Mesh(jax.devices(), ("rows",)), PartitionSpec("rows"))

    @nnx.jit
    def descend(model, optimizer, images, labels):
        def loss_fn(model):
            return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()

        loss, gradients = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, gradients)
        return loss

    @nnx.jit
    def accuracy_of(model, images, labels):
        return (model(images).argmax(1) == labels).mean()

    shard, test = paceline.get_data_shard(), config["test"]
    for epoch in range(done + 1, config["epochs"] + 1):
        model.train()
        losses = []
        for batch in shard.iter_batches(global_batch_size=config["batch_size"], rest="drop"):
            whole = {name: jax.make_array_from_process_local_data(rows, part) for name, part in batch.items()}
            losses.append(descend(model, optimizer, whole["image"], whole["label"]))
        model.eval()
        accuracy = accuracy_of(model, test["image"], test["label"])
        paceline.report(epoch=epoch, loss=np.mean(losses), accuracy=accuracy)
        state = {name: nnx.to_pure_dict(nnx.state(part)) for name, part in both.items()}
        paceline.save_checkpoint(epoch=epoch, **state)
    return accuracy.item()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--results", default="demo_results")
    args = parser.parse_args()

    images, labels = load_digits(return_X_y=True)
    images, labels = (images / 16).astype("f4"), labels.astype("i4")
    dataset = from_numpy({"image": images[:1500], "label": labels[:1500]}).random_shuffle(seed=0)
    config = {
        "lr": 3e-3,
        "batch_size": 60,
        "epochs": args.epochs,
        "test": {"image": images[1500:], "label": labels[1500:]},
    }
    engine = LocalEngine(preload=["flax.nnx", "optax"])  # then a worker that is replaced need not import them
    with Trainer("jax", args.workers, engine=engine, logdir=os.path.abspath(args.results)) as trainer:
        for step in trainer.run_iterator(train_digits, config, dataset=dataset):
            print(f"epoch {step[0]['epoch']}: loss {step[0]['loss']:.4f}, accuracy {step[0]['accuracy']:.1%}")
        print(f"The run is in {trainer.latest_run_dir}")


if __name__ == "__main__":
    main()
