"""The `src/experiment.py` of a project that is launched: the template's without torchmetrics and torch's optimizers,
which bring half of torch: each of a job's programs would import them, for longer than it does anything else."""

# ruff: noqa: B008 - objects as defaults are what the configuration is made of

import os
import sys

import torch
from src.data import TestDataset, TrainDataset, ValDataset
from src.model import DNN
from torch.nn.functional import mse_loss

import paceline
from paceline.experiment import BaseModule, TrainConfig, prepare_model


class Datasets:
    def __init__(
        self,
        train: TrainDataset = TrainDataset(),
        val: ValDataset = ValDataset(),
        test: TestDataset = TestDataset(),
    ):
        self.train, self.val, self.test = train, val, test


class Models:
    def __init__(self, dnn: DNN = DNN()):
        self.dnn = dnn


class Experiment(BaseModule):
    def __init__(self, cfg: TrainConfig, models: Models, datasets: Datasets):
        super().__init__(cfg=cfg, models=models, datasets=datasets)
        assert "torchmetrics" not in sys.modules, "nobody here has a metric: it was imported in vain"

    def worker_loop(self, dataset_shards):
        self.models.dnn = prepare_model(self.models.dnn)
        train_loader, val_loader, _ = self.generate_loaders(dataset_shards)
        for epoch in range(self.cfg.start_epoch, self.cfg.num_epochs):
            with self.stage("train"):
                for batch in train_loader:
                    mse_loss(self.models.dnn(batch["inputs"]), batch["label"]).backward()
                    self.descend()
            is_mended = os.path.exists(os.environ["PACELINE_STORAGE"] + "/mended")
            if (self.cfg.start_workers, epoch) == (1, 1) and not is_mended:
                raise RuntimeError("not yet")
            with self.stage("val"), torch.no_grad():
                losses = [mse_loss(self.models.dnn(batch["inputs"]), batch["label"]) for batch in val_loader]
            values = {"val_loss": float(sum(losses) / len(losses))}
            paceline.report(epoch=epoch, **values)
            self.save_checkpoint(epoch, values)

    @torch.no_grad()
    def descend(self):
        for weight in self.models.dnn.parameters():
            weight -= 1e-3 * weight.grad
            weight.grad = None
