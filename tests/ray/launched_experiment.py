"""The `src/experiment.py` of a project that is launched: the template's without torchmetrics, which each of a job's
programs would import, for longer than it does anything else."""

# ruff: noqa: B008 - objects as defaults are what the configuration is made of

import os
import sys

import torch
from src.data import TestDataset, TrainDataset, ValDataset
from src.model import DNN
from torch.nn.functional import mse_loss
from torch.optim import Adam

import paceline
from paceline.experiment import DUMMY_PARAMS, BaseModule, TrainConfig, prepare_model


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
        self.map_params_to_optimizers = {"dnn": "adam"}


class Optimizers:
    def __init__(self, adam: Adam = Adam(DUMMY_PARAMS, lr=3e-3)):
        self.adam = adam


class Experiment(BaseModule):
    def __init__(self, cfg: TrainConfig, models: Models, datasets: Datasets, optimizers: Optimizers):
        super().__init__(cfg=cfg, models=models, datasets=datasets, optimizers=optimizers)
        assert "torchmetrics" not in sys.modules, "nobody here has a metric: it was imported in vain"

    def worker_loop(self, dataset_shards):
        self.models.dnn = prepare_model(self.models.dnn)
        train_loader, val_loader, _ = self.generate_loaders(dataset_shards)
        for epoch in range(self.cfg.start_epoch, self.cfg.num_epochs):
            with self.stage("train"):
                for batch in train_loader:
                    mse_loss(self.models.dnn(batch["inputs"]), batch["label"]).backward()
                    self.optimizers.adam.step()
                    self.optimizers.adam.zero_grad()
            is_mended = os.path.exists(os.environ["PACELINE_STORAGE"] + "/mended")
            if (self.cfg.seed, epoch) == (2, 1) and not is_mended:
                raise RuntimeError("not yet")
            with self.stage("val"), torch.no_grad():
                losses = [mse_loss(self.models.dnn(batch["inputs"]), batch["label"]) for batch in val_loader]
            values = {"val_loss": float(sum(losses) / len(losses))}
            paceline.report(epoch=epoch, **values)
            self.save_checkpoint(epoch, values)
