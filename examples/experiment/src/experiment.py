"""The experiment: what it is made of, and its loop."""

import torch
import torchmetrics as tm
from torch.optim import Adam

import src.losses as custom_losses
import src.metrics as custom_metrics
from paceline.experiment import DUMMY_PARAMS, BaseModule, TrainConfig, prepare_model
from src.data import TestDataset, TrainDataset, ValDataset
from src.model import DNN
from src.tools import EarlyStopping, LRScheduler

# ruff: noqa: B008 - objects as defaults are what the configuration is made of


class Datasets:
    def __init__(
        self,
        train: TrainDataset = TrainDataset(),
        val: ValDataset = ValDataset(),
        test: TestDataset = TestDataset(),
    ) -> None:
        self.train = train
        self.val = val
        self.test = test


class Models:
    def __init__(self, dnn: DNN = DNN()) -> None:
        self.dnn = dnn
        self.map_params_to_optimizers = {"dnn": "adam"}


class Optimizers:
    def __init__(self, adam: Adam = Adam(DUMMY_PARAMS, lr=3e-3)) -> None:
        self.adam = adam


class Losses:
    def __init__(
        self,
        loss1: tm.MeanSquaredError = tm.MeanSquaredError(),
        loss2: custom_losses.HuberLossMetric = custom_losses.HuberLossMetric(),
    ) -> None:
        self.loss1 = loss1
        self.loss2 = loss2


class Metrics:
    def __init__(
        self,
        mae: tm.MeanAbsoluteError = tm.MeanAbsoluteError(),
        mbd: custom_metrics.MeanBiasDeviation = custom_metrics.MeanBiasDeviation(),
    ) -> None:
        self.mae = mae
        self.mbd = mbd


class Tools:
    def __init__(
        self,
        early_stoppage: EarlyStopping = EarlyStopping(),
        lr_scheduler: LRScheduler = LRScheduler(),
    ):
        self.early_stoppage = early_stoppage
        self.lr_scheduler = lr_scheduler


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
        super().__init__(
            cfg=cfg,
            models=models,
            datasets=datasets,
            optimizers=optimizers,
            losses=losses,
            metrics=metrics,
            tools=tools,
        )
        # What follows from the data is set here, not in conf.yaml.
        steps = len(self.datasets.train) // self.datasets.train.batch_size * self.cfg.num_epochs
        self.tools.lr_scheduler.total_steps = max(steps, self.tools.lr_scheduler.warmup_steps + 1)

    def worker_loop(self, dataset_shards):
        self.models.dnn = prepare_model(self.models.dnn)
        train_loader, val_loader, _ = self.generate_loaders(dataset_shards=dataset_shards)

        for epoch in range(self.cfg.start_epoch, self.cfg.num_epochs):
            with self.stage("train"):
                self.train_steps(dataloader=train_loader, epoch=epoch)
            with self.stage("val"):
                values = self.validate(val_loader, epoch)
            is_enough = self.tools.early_stoppage(values["val_loss1"])
            self.save_checkpoint(epoch=epoch, metrics=values)  # after all that changes in the epoch, tools among it
            if is_enough:
                break

    def train_steps(self, dataloader, epoch: int):
        self.models.dnn.train()
        self.reset_all_metrics_and_losses()
        for batch_idx, batch in enumerate(dataloader):
            x, y = batch["inputs"], batch["label"]
            output = self.models.dnn(x)

            loss = self.losses.loss1(output, y)  # of this batch; it counts in the loss of the epoch, too
            loss.backward()
            for one in (self.losses.loss2, self.metrics.mae, self.metrics.mbd):
                one.update(output.detach(), y)
            self.save_metrics_and_losses(batch_idx=batch_idx, epoch=epoch)

            self.optimizers.adam.step()
            self.optimizers.adam.zero_grad()
            self.tools.lr_scheduler.step(self.optimizers.adam)

    def validate(self, dataloader, epoch: int):
        self.models.dnn.eval()  # without dropout
        self.reset_all_metrics_and_losses()
        with torch.no_grad():
            for batch in dataloader:
                output = self.models.dnn(batch["inputs"])
                for one in (self.losses.loss1, self.losses.loss2, self.metrics.mae, self.metrics.mbd):
                    one.update(output, batch["label"])
        return self.save_metrics_and_losses(epoch=epoch, prefix="val_")
