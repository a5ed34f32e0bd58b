"""The same script with Paceline: python horovod_after.py. It reports, saves, and goes on after a worker is killed."""

import horovod.torch as hvd
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import paceline


def train(config):
    hvd.init()
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(data, config["batch_size"], sampler=sampler)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), config["lr"])
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    start = 0
    if checkpoint := paceline.load_checkpoint():
        start = checkpoint["epoch"] + 1
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    for epoch in range(start, config["epochs"]):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        mean = hvd.allreduce(loss.detach(), name="loss").item()
        paceline.report(epoch=epoch, loss=mean)
        paceline.save_checkpoint(epoch=epoch, model=model.state_dict(), optimizer=optimizer.state_dict())
    return mean


if __name__ == "__main__":
    with paceline.Trainer(backend="horovod", num_workers=2) as trainer:
        print(trainer.run(train, {"lr": 0.003, "batch_size": 32, "epochs": 5}))
