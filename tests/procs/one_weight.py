"""A trial with a known outcome: one weight, fitted to 1. What happens to it can be computed by hand."""

import random

import numpy as np
import torch

from paceline import pytorch

LR = 0.05
ROWS = [1.0 + 0.1 * number for number in range(24)]


class Rows(torch.utils.data.Dataset):
    """Numbers; with `noise`, each time a little different."""

    def __init__(self, rows=ROWS, noise=False):
        self.rows, self.noise = rows, noise

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        extra = random.random() + np.random.rand() + torch.rand(1).item() if self.noise else 0.0
        return torch.tensor([self.rows[index] + 0.01 * extra])


class OneWeight(pytorch.PyTorchTrial):
    """Keeps the rows of every batch in `seen`, and the weight after it in `weights`."""

    def __init__(self, context, noise=False, shuffle=False, num_workers=0, rows=ROWS, callbacks=None, **kinds):
        self.context, self.noise, self.shuffle, self.num_workers, self.rows = context, noise, shuffle, num_workers, rows
        self.callbacks = callbacks or {}
        if kinds.get("amp"):
            context.experimental.use_amp()
        model = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False), torch.nn.Dropout(0.5 if noise else 0.0))
        model[0].weight.data.fill_(0.3 if noise else 0.0)
        self.model = context.wrap_model(model)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=LR, momentum=0.9 if noise else 0.0)
        self.optimizer = context.wrap_optimizer(optimizer)
        scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 5, 0.9 if noise else 1.0)
        context.wrap_lr_scheduler(scheduler, pytorch.LRScheduler.StepMode.STEP_EVERY_BATCH)
        self.seen, self.weights, self.indices = [], [], []

    def train_batch(self, batch, epoch_idx, batch_idx):
        loss = ((self.model(batch) - batch) ** 2).mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        self.seen.append([round(value, 6) for value in batch.flatten().tolist()])
        self.weights.append(self.weight())
        self.indices.append((epoch_idx, batch_idx))
        return {"loss": loss}

    def evaluate_batch(self, batch):
        return {"validation_loss": ((self.model(batch) - batch) ** 2).mean()}

    def build_training_data_loader(self):
        size = self.context.get_per_slot_batch_size()
        data = Rows(self.rows, self.noise)
        return pytorch.DataLoader(data, size, shuffle=self.shuffle, num_workers=self.num_workers)

    def build_validation_data_loader(self):
        return pytorch.DataLoader(Rows(), self.context.get_per_slot_batch_size())

    def build_callbacks(self):
        return self.callbacks

    def weight(self):
        return (
            self.model[0].weight.item()
            if isinstance(self.model, torch.nn.Sequential)
            else (self.model.module[0].weight.item())
        )


def expected_weights(batches, start=0.0):
    """Of plain descent: the loss of a batch is (w - 1)^2 times the mean of x^2."""
    weight, weights = start, []
    for batch in batches:
        weight -= LR * 2 * (weight - 1) * np.mean(np.square(batch))
        weights.append(weight)
    return weights


def train(logdir, length, trial_kwargs=None, init=None, **options):
    """In this process. Gives the trial and the result."""
    with pytorch.init(hparams={"global_batch_size": 4}, logdir=logdir, **(init or {})) as context:
        trial = OneWeight(context, **(trial_kwargs or {}))
        result = pytorch.Trainer(trial, context).fit(max_length=length, **options)
    return trial, result
