"""An experiment with a bit of everything, for tests of what is made of it: see `schema_of(Experiment)`."""

# ruff: noqa: B008 - objects as defaults are the point

import enum
import itertools
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torchmetrics as tm
from torch import nn
from torch.optim import SGD, Adam
from torch.utils.data import Dataset

import paceline
from paceline import session
from paceline.experiment import DUMMY_PARAMS, BaseModule, TrainConfig, prepare_model


class Color(enum.Enum):
    RED = 1
    BLUE = "b"


class Numbers(Dataset):
    """Rows (x, 2x) of whole numbers."""

    def __init__(self, num_rows: int = 24, batch_size: int = 4, shuffle: bool = False):
        self.num_rows, self.batch_size, self.shuffle = num_rows, batch_size, shuffle

    def __len__(self):
        return self.num_rows

    def __getitem__(self, index):
        return torch.tensor([float(index)]), torch.tensor([2.0 * index])

    @staticmethod
    def ray_map_batches(batch):
        rows = batch["item"]
        return {"x": torch.stack([row[0] for row in rows]), "y": torch.stack([row[1] for row in rows])}


class Block(nn.Module):
    def __init__(
        self,
        width: int = 1,
        dropout: float = 0.0,
        color: Color = Color.RED,
        folder: Path | None = None,
        sizes: tuple[int, float] = (1, 2.0),
        mode: Literal["a", "b"] = "a",
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.given = {"color": color, "folder": folder, "sizes": sizes, "mode": mode, "dtype": dtype}
        self.layer, self.dropout = nn.Linear(1, width), nn.Dropout(dropout)

    def forward(self, x):
        return self.dropout(self.layer(x))


class WideBlock(Block):
    def __init__(self, width: int = 8, scale: float = 2.0):
        super().__init__(width)
        self.scale = scale


class Net(nn.Module):
    def __init__(
        self,
        block: Block = Block(3, color=Color.BLUE),
        head: nn.Module = nn.Sequential(nn.Linear(3, 1), nn.Identity()),
        names: list[str] | None = None,
    ):
        super().__init__()
        self.block, self.head, self.names = block, head, names

    def forward(self, x):
        return self.head(self.block(x))


class Models:
    def __init__(self, net: Net = Net(), teacher: nn.Linear = nn.Linear(1, 1)):
        self.net, self.teacher = net, teacher
        self.map_params_to_optimizers = {"net": "sgd"}


class Optimizers:
    def __init__(self, sgd: SGD = SGD(DUMMY_PARAMS, lr=1e-4, momentum=0.5)):
        self.sgd = sgd


class Datasets:
    def __init__(self, train: Numbers = Numbers(shuffle=True), val: Numbers = Numbers(9)):
        self.train, self.val = train, val


class Losses:
    def __init__(self, mse: tm.MeanSquaredError = tm.MeanSquaredError()):
        self.mse = mse


class Metrics:
    def __init__(self, mae: tm.MeanAbsoluteError = tm.MeanAbsoluteError(), unused: tm.SumMetric = tm.SumMetric()):
        self.mae, self.unused = mae, unused


class Patience:
    def __init__(self, most=100):
        self.most, self.num_calls = most, 0

    def __call__(self, value):
        self.num_calls += 1
        return bool(value > self.most)


class HastyPatience(Patience):
    agree_timeout_s = 1.0


class Tools:
    def __init__(self, patience: Patience = Patience()):
        self.patience = patience


class Experiment(BaseModule):
    def __init__(
        self,
        cfg: TrainConfig,
        models: Models,
        datasets: Datasets,
        losses: Losses,
        optimizers: Optimizers,
        metrics: Metrics,
        tools: Tools,
    ):
        super().__init__(cfg, models, datasets, optimizers, losses, metrics, tools)
        self.history: list[float] = []
        self.register_stateful("history")

    def worker_loop(self, dataset_shards):
        self.models.net = prepare_model(self.models.net)
        train_loader, *val_loaders = self.generate_loaders(dataset_shards)
        for epoch in range(self.cfg.start_epoch, self.cfg.num_epochs):
            self.reset_all_metrics_and_losses()
            for batch_idx, batch in self.numbered(train_loader):
                self.train_batch(batch)
                self.save_metrics_and_losses(epoch, batch_idx)
                self.after_batch(epoch, batch_idx)
            values = self.validate(val_loaders, epoch)
            self.history.append(values["mse"])
            is_enough = self.tools.patience(values["mse"])
            self.save_checkpoint(epoch, values)
            if is_enough:
                break
        return self.result()

    def train_batch(self, batch):
        output = self.models.net(batch["x"] / 24)
        loss = self.losses.mse(output, batch["y"] / 24)
        loss.backward()
        self.metrics.mae.update(output.detach(), batch["y"] / 24)
        self.optimizers.sgd.step()
        self.optimizers.sgd.zero_grad()

    def after_batch(self, epoch, batch_idx):
        """For those who want something to happen there."""

    def validate(self, loaders, epoch):
        self.reset_all_metrics_and_losses()
        with torch.no_grad():
            for batch in itertools.chain(*loaders):
                output = self.models.net(batch["x"] / 24)
                self.losses.mse.update(output, batch["y"] / 24)
        return self.save_metrics_and_losses(epoch)

    def result(self):
        weights = torch.cat([p.detach().flatten() for p in self.models.net.parameters()])
        return {"weights": weights.tolist(), "history": self.history, "calls": self.tools.patience.num_calls}


class TwoOptimizers:
    def __init__(self, first: Adam = Adam(DUMMY_PARAMS, lr=0.1), second: Adam = Adam(DUMMY_PARAMS, lr=0.2)):
        self.first, self.second = first, second


class SeveralModels:
    def __init__(self, a: nn.Linear = nn.Linear(1, 1), b: nn.Linear = nn.Linear(1, 2), c: nn.Linear = nn.Linear(1, 3)):
        self.a, self.b, self.c = a, b, c
        self.map_params_to_optimizers = {"a": "first", "b": ["first"], "c": ["first", "second"]}


class Several(BaseModule):
    def __init__(self, cfg: TrainConfig, models: SeveralModels, optimizers: TwoOptimizers):
        super().__init__(cfg=cfg, models=models, optimizers=optimizers)

    def worker_loop(self, dataset_shards):
        return [[len(group["params"]) for group in one.param_groups] for one in vars(self.optimizers).values()]


@dataclass
class ExactConfig(TrainConfig):
    die_at: tuple[int, int] | None = None
    """Epoch and batch after which the last rank of the first attempt is killed."""
    fail_at: tuple[int, int] | None = None
    """Epoch and batch after which the first attempt raises, or the one after the kill."""
    save_every: int | None = None
    """Batches between checkpoints in the middle of an epoch."""
    interrupt_at: tuple[int, int] | None = None
    """Epoch and batch after which the driver gets a Ctrl-C."""
    stops_alone: int | None = None
    """The rank that wants to stop after the first epoch."""
    asks_alone: int | None = None
    """The rank that calls its tool once more than others."""


class CountedRows:
    def __init__(self, rows: tm.SumMetric = tm.SumMetric(), mae: tm.MeanAbsoluteError = tm.MeanAbsoluteError()):
        self.rows, self.mae = rows, mae


class Exact(Experiment):
    """Counts the rows of each epoch over all ranks, and draws random numbers for every batch."""

    def __init__(
        self,
        cfg: ExactConfig,
        models: Models,
        datasets: Datasets,
        losses: Losses,
        optimizers: Optimizers,
        metrics: CountedRows,
        tools: Tools,
    ):
        super().__init__(cfg, models, datasets, losses, optimizers, metrics, tools)
        self.rows_of_epochs: list[float] = []
        self.register_stateful("rows_of_epochs")

    def train_batch(self, batch):
        super().train_batch({name: value + 0.01 * torch.rand(()) for name, value in batch.items()})
        self.metrics.rows.update(torch.tensor(float(len(batch["x"]))))

    def after_batch(self, epoch, batch_idx):
        if self.cfg.save_every and batch_idx % self.cfg.save_every == 0:
            self.save_checkpoint(epoch, batch_idx=batch_idx)
        if self.cfg.die_at == (epoch, batch_idx) and session.current().attempt == 0:
            paceline.load_checkpoint()  # waits until what was saved is safe
            if paceline.world_rank() == paceline.world_size() - 1:
                os.kill(os.getpid(), signal.SIGKILL)
        if self.cfg.interrupt_at == (epoch, batch_idx) and paceline.world_rank() == 0:
            os.kill(int(os.environ["DRIVER_PID"]), signal.SIGINT)
        if self.cfg.fail_at == (epoch, batch_idx) and session.current().attempt == (self.cfg.die_at is not None):
            raise RuntimeError("as asked")

    def validate(self, loaders, epoch):
        self.rows_of_epochs.append(self.save_metrics(epoch, report=False)["rows"])
        values = super().validate(loaders, epoch)
        if self.cfg.stops_alone == paceline.world_rank():
            self.tools.patience.most = -1.0
        if self.cfg.asks_alone == paceline.world_rank():
            self.tools.patience(0.0)
            self.tools.patience(0.0)
        return values

    def result(self):
        return {**super().result(), "rows": self.rows_of_epochs, "lr": self.optimizers.sgd.param_groups[0]["lr"]}
