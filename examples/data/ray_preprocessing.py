"""Let Ray Data prepare rows on the cluster while workers train on them.

    python examples/data/ray_preprocessing.py

Starts a small Ray on this machine, unless RAY_ADDRESS names one.
"""

import os

import numpy as np
import ray
import torch

import paceline
from paceline import Trainer


def main():
    ray.init(num_cpus=None if "RAY_ADDRESS" in os.environ else 3, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    rows = ray.data.range(20_000, override_num_blocks=8)
    dataset = rows.map_batches(make_features).filter(lambda row: row["x"] > 0.1)
    with Trainer(backend="torch", num_workers=2, cpus_per_worker=1) as trainer:
        slopes = trainer.run(train, {"epochs": 3, "batch_size": 100}, dataset=dataset)
    print(f"trained on engine {trainer.engine.name!r}: y = {slopes[0]:.2f} x")


def make_features(batch):
    x = batch["id"] / 20_000
    return {"x": x.astype(np.float32), "y": (3 * x).astype(np.float32)}


def train(config):
    model = paceline.prepare_model(torch.nn.Linear(1, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shard = paceline.get_data_shard()
    for epoch in range(config["epochs"]):
        for x, y in shard.to_torch(batch_size=config["batch_size"], feature_columns=["x"], label_column="y"):
            loss = torch.nn.functional.mse_loss(model(x)[:, 0], y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        paceline.report(epoch=epoch, loss=loss)
        paceline.save_checkpoint(epoch=epoch, model=model.state_dict())
    return paceline.unwrap_model(model).weight.item()


if __name__ == "__main__":
    main()
