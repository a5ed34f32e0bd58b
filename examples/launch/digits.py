"""A script for torchrun that also reports and saves: handwritten digits under DistributedDataParallel.

torchrun --nproc-per-node 2 examples/launch/digits.py --epochs 5
paceline run -n 2 examples/launch/digits.py --epochs 5
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import paceline


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.005)
    args = parser.parse_args()

    dist.init_process_group("gloo")  # it finds RANK, WORLD_SIZE, MASTER_ADDR … in the environment
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    train_set = TensorDataset(images[:1500], labels[:1500])
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=32, sampler=sampler)

    network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(network.parameters(), args.lr)
    first_epoch = 0
    if checkpoint := paceline.load_checkpoint():  # under torchrun: None, after a warning that nothing is recorded
        network.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        first_epoch = checkpoint["epoch"]
    model = DistributedDataParallel(network)

    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)
        for batch, targets in loader:
            loss = nn.functional.cross_entropy(model(batch), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            accuracy = (network(images[1500:]).argmax(1) == labels[1500:]).float().mean().item()
        paceline.report(epoch=epoch + 1, loss=loss, accuracy=accuracy)
        paceline.save_checkpoint(epoch=epoch + 1, model=network.state_dict(), optimizer=optimizer.state_dict())
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: accuracy {accuracy:.3f}")
        if paceline.should_stop():
            break


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # when the model is gone: under torchrun, the other way round hangs now and then
