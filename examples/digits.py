"""Train a classifier of handwritten digits on two workers, then show a table and a picture of the curves.

python examples/digits.py [--workers 2] [--epochs 12] [--results demo_results]
"""

import argparse
import os

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline import Trainer


def load_data():
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    return torch.utils.data.random_split(data, [1500, len(data) - 1500], torch.Generator().manual_seed(0))


def train_digits(config):
    paceline.enable_reproducibility(seed=0)
    train_set, test_set = load_data()
    loader = paceline.prepare_data_loader(DataLoader(train_set, config["batch_size"], shuffle=True))
    test_images, test_labels = test_set[:]

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
    model = paceline.prepare_model(model)
    optimizer = torch.optim.Adam(model.parameters(), config["lr"])
    loss_fn = nn.CrossEntropyLoss()

    for epoch in range(1, config["epochs"] + 1):
        model.train()
        losses = []
        for images, labels in loader:
            optimizer.zero_grad()
            loss = loss_fn(model(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            accuracy = (model(test_images).argmax(1) == test_labels).float().mean()
        paceline.report(epoch=epoch, loss=sum(losses) / len(losses), accuracy=accuracy)
        paceline.save_checkpoint(epoch=epoch, model=model.state_dict(), accuracy=accuracy.item())
    return accuracy.item()


def show(run, best_path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from rich.console import Console
    from rich.table import Table

    metrics = run.metrics.groupby("step")[["loss", "accuracy"]].mean()
    table = Table(title=f"{run.name}: {run.status.state}")
    for column in ("epoch", "loss", "test accuracy"):
        table.add_column(column, justify="right")
    for step, row in metrics.iterrows():
        table.add_row(str(step), f"{row.loss:.4f}", f"{row.accuracy:.1%}")
    Console().print(table)

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for axis, (name, values) in zip(axes, metrics.items(), strict=True):
        axis.plot(values.index, values, marker="o", color="#2a6fbb")
        axis.set(xlabel="epoch", title=name)
        axis.grid(alpha=0.3)
    picture = run.path / "curves.png"
    figure.savefig(picture, dpi=120)
    print(f"best checkpoint  {best_path}\ncurves           {picture}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--results", default="demo_results", help="folder for the run (default: %(default)s)")
    args = parser.parse_args()

    strategy = paceline.CheckpointStrategy(num_to_keep=2, checkpoint_score_attribute="accuracy")
    config = {"lr": 0.003, "batch_size": 32, "epochs": args.epochs}
    with Trainer(backend="torch", num_workers=args.workers, logdir=os.path.abspath(args.results)) as trainer:
        print(trainer)
        accuracies = trainer.run(train_digits, config, checkpoint_strategy=strategy)
        show(paceline.load_run(trainer.latest_run_dir), trainer.best_checkpoint_path)
    print(f"accuracy on each worker: {', '.join(f'{accuracy:.1%}' for accuracy in accuracies)}")


if __name__ == "__main__":
    main()
