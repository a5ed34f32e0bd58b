"""Search for the learning rate of a classifier of handwritten digits: trials of two workers each, the bad ones stopped.

python examples/tune_digits.py [--trials 4] [--epochs 8] [--results tune_results]
"""

import argparse
import os

import torch
from ray import tune
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline import Trainer


def train(config):
    paceline.enable_reproducibility(seed=0)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    train_set, test_set = torch.utils.data.random_split(data, [1500, 297], torch.Generator().manual_seed(0))
    loader = paceline.prepare_data_loader(DataLoader(train_set, 32, shuffle=True))
    test_images, test_labels = test_set[:]

    model = paceline.prepare_model(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.SGD(model.parameters(), config["lr"])
    for epoch in range(config["epochs"]):
        for batch, targets in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch), targets).backward()
            optimizer.step()
        with torch.no_grad():
            accuracy = (model(test_images).argmax(1) == test_labels).float().mean()
        paceline.save_checkpoint(epoch=epoch, model=model.state_dict())
        paceline.report(accuracy=accuracy)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--results", default="tune_results", help="folder for everything (default: %(default)s)")
    args = parser.parse_args()
    results = os.path.abspath(args.results)

    trainer = Trainer(backend="torch", num_workers=2, cpus_per_worker=0.5, logdir=f"{results}/runs")
    tuner = tune.Tuner(
        trainer.to_tune_trainable(train),
        param_space={"lr": tune.grid_search([0.001 * 10**n for n in range(args.trials)]), "epochs": args.epochs},
        tune_config=tune.TuneConfig(
            metric="accuracy",
            mode="max",
            scheduler=tune.schedulers.ASHAScheduler(max_t=args.epochs, grace_period=2, reduction_factor=2),
            reuse_actors=True,
            max_concurrent_trials=1,
        ),
        run_config=tune.RunConfig(storage_path=f"{results}/tune", verbose=0),
    )
    grid = tuner.fit()
    for result in grid:
        metrics = result.metrics
        print(f"lr={result.config['lr']:g}: {metrics['accuracy']:.1%} after {metrics['training_iteration']} epochs")
    best = grid.get_best_result()
    model = paceline.read_checkpoint(best.checkpoint.path)["model"]
    print(f"best: lr={best.config['lr']:g}, a model of {sum(value.numel() for value in model.values())} weights")


if __name__ == "__main__":
    main()
