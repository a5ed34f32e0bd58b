"""An experiment on Ray's data that counts the rows it gets. Without torchmetrics, which each of its workers, programs
of their own on Ray, would import for longer than it trains."""

# ruff: noqa: B008 - objects as defaults are the point

import os
import signal
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD
from torch.utils.data import Dataset, TensorDataset

import paceline
from paceline import session
from paceline.experiment import DUMMY_PARAMS, BaseModule, TrainConfig, prepare_model


@dataclass
class Config(TrainConfig):
    die_at: tuple[int, int] | None = None
    """Epoch and batch after which the last rank of the first attempt is killed."""
    fail_at: tuple[int, int] | None = None
    """Epoch and batch after which the attempt after that raises."""


class Numbers(Dataset):
    """Rows (x, 2x) of whole numbers."""

    def __init__(self, num_rows: int = 24, batch_size: int = 4):
        self.num_rows, self.batch_size = num_rows, batch_size

    def __len__(self):
        return self.num_rows

    def __getitem__(self, index):
        return torch.tensor([float(index)]), torch.tensor([2.0 * index])

    @staticmethod
    def ray_map_batches(batch):
        rows = batch["item"]
        return {"x": torch.stack([row[0] for row in rows]), "y": torch.stack([row[1] for row in rows])}


class RayNumbers:
    """The same rows, as a Ray dataset: of columns, or of a torch dataset."""

    def __init__(self, num_rows: int = 24, batch_size: int = 4, is_torchs: bool = False):
        self.num_rows, self.batch_size, self.is_torchs = num_rows, batch_size, is_torchs

    def ray_dataset(self):
        import ray.data

        ray.data.DataContext.get_current().enable_progress_bars = False
        x = torch.arange(float(self.num_rows)).unsqueeze(1)
        return ray.data.from_torch(TensorDataset(x, 2 * x)) if self.is_torchs else ray.data.range(self.num_rows)

    @staticmethod
    def ray_map_batches(batch):
        if "item" in batch:
            return Numbers.ray_map_batches(batch)
        x = batch["id"].float().unsqueeze(1)
        return {"x": x, "y": 2 * x}


class Datasets:
    """Ray's of both kinds and our own, side by side."""

    def __init__(
        self,
        train: RayNumbers = RayNumbers(is_torchs=True),
        columns: RayNumbers = RayNumbers(8),
        val: Numbers = Numbers(9),
    ):
        self.train, self.columns, self.val = train, columns, val


class Models:
    def __init__(self, net: nn.Linear = nn.Linear(1, 1)):
        self.net = net
        self.map_params_to_optimizers = {"net": "sgd"}


class Optimizers:
    def __init__(self, sgd: SGD = SGD(DUMMY_PARAMS, lr=1e-4)):
        self.sgd = sgd


class OnRayData(BaseModule):
    def __init__(self, cfg: Config, models: Models, datasets: Datasets, optimizers: Optimizers):
        super().__init__(cfg=cfg, models=models, datasets=datasets, optimizers=optimizers)
        self.num_rows = 0
        """Of this epoch, on this rank."""
        self.rows_of_epochs: list[list[float]] = []
        self.register_stateful("num_rows", "rows_of_epochs")

    def worker_loop(self, dataset_shards):
        self.models.net = prepare_model(self.models.net)
        train_loader, *others = self.generate_loaders(dataset_shards)
        for epoch in range(self.cfg.start_epoch, self.cfg.num_epochs):
            for batch_idx, batch in self.numbered(train_loader):
                ((self.models.net(batch["x"]) - batch["y"]) ** 2).mean().backward()
                self.optimizers.sgd.step()
                self.optimizers.sgd.zero_grad()
                self.num_rows += len(batch["x"])
                self.save_checkpoint(epoch, batch_idx=batch_idx)
                self.after_batch(epoch, batch_idx)
            of_others = [sum(len(batch["x"]) for batch in loader) for loader in others]
            counts = torch.tensor([float(self.num_rows), *of_others])
            dist.all_reduce(counts)
            self.num_rows = 0
            self.rows_of_epochs.append(counts.tolist())
            self.save_checkpoint(epoch)
        return self.rows_of_epochs

    def after_batch(self, epoch, batch_idx):
        attempt = session.current().attempt
        if self.cfg.die_at == (epoch, batch_idx) and attempt == 0:
            paceline.load_checkpoint()  # waits until what was saved is safe
            if paceline.world_rank() == paceline.world_size() - 1:
                os.kill(os.getpid(), signal.SIGKILL)
        if self.cfg.fail_at == (epoch, batch_idx) and attempt == 1:
            raise RuntimeError("as asked")
