"""Five-fold cross-validation of a digit classifier, all folds in one run on one warm group.

    python examples/data/folds.py

Every fold has as many of each digit. The run folder has a curve for each fold, and their mean and deviation.
"""

import torch
from sklearn.datasets import load_digits

import paceline
from paceline import Trainer
from paceline.data import from_numpy, to_cv


def main():
    images, labels = load_digits(return_X_y=True)
    dataset = from_numpy({"image": (images / 16).astype("float32"), "digit": labels})
    folds = to_cv(dataset, splits=5, shuffle=True, stratify="digit")
    with Trainer(backend="torch", num_workers=2, cpus_per_worker=1) as trainer:
        trainer.run(train, {"epochs": 4}, dataset=folds)
    accuracy = paceline.load_run(trainer.latest_run_dir).folds["accuracy"]
    print(" ".join(f"{value:.3f}" for value in accuracy.drop(["mean", "std"])))
    print(f"accuracy {accuracy['mean']:.3f} ± {accuracy['std']:.3f}")


def train(config):
    for index, (train_set, val_set) in paceline.get_datasets().items():
        torch.manual_seed(index)
        model = paceline.prepare_model(torch.nn.Linear(64, 10))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(config["epochs"]):
            for x, y in train_set.random_shuffle().get_split().to_torch(batch_size=32, label_column="digit"):
                loss = torch.nn.functional.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        paceline.report(cv=index, accuracy=accuracy_on(val_set, model))
        paceline.save_checkpoint(fold=index)


@torch.no_grad()
def accuracy_on(val_set, model):
    """Over the rows of all ranks."""
    counts = torch.zeros(2)
    for x, y in val_set.get_split().to_torch(batch_size=256, label_column="digit"):
        counts += torch.tensor([(paceline.unwrap_model(model)(x).argmax(1) == y).sum(), len(y)])
    torch.distributed.all_reduce(counts)
    return (counts[0] / counts[1]).item()


if __name__ == "__main__":
    main()
