"""An ordinary loop that stays in this process, while the model, its optimizer and the data are on two workers.

python examples/driven_loop.py
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from paceline.driven import WorkerGroup


def digits():
    data = load_digits()
    images = torch.tensor(data.data, dtype=torch.float32) / 16
    labels = torch.tensor(data.target)
    return (images[:1536], labels[:1536]), (images[1536:], labels[1536:])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2, help="0: all in this process, for a debugger")
    args = parser.parse_args()

    torch.manual_seed(0)
    criterion = nn.CrossEntropyLoss()
    training, (images, labels) = digits()

    with WorkerGroup(num_workers=args.workers) as worker_group:
        model = worker_group.distribute(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))
        optimizer = worker_group.optimizer(torch.optim.SGD, model, lr=0.5)
        dataset = worker_group.batches(TensorDataset(*training), global_batch_size=64)

        for epoch in range(args.epochs):
            running_loss = 0.0
            for i, (input_batch, label_batch) in enumerate(dataset):
                optimizer.zero_grad()

                output_batch = model(input_batch)
                loss = worker_group.apply(criterion, output_batch, label_batch)
                loss.backward()
                optimizer.step()

                running_loss += loss.item()
                if i % 12 == 11:
                    print(f"[{epoch + 1}, {i + 1:5d}] loss: {running_loss / 12:.3f}")
                    running_loss = 0.0

        model.eval()
        with worker_group.no_grad():
            guesses = model(images)  # all of them, on every rank
        accuracy = worker_group.apply(lambda: (guesses.argmax(1) == labels).float().mean())
        print(f"accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
