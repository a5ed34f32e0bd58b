"""Metrics of our own, which are the same for any number of workers."""

import torch
from torchmetrics import Metric


class MeanBiasDeviation(Metric):
    """Whether predictions are too high or too low, on the whole."""

    def __init__(self):
        super().__init__()
        self.add_state("sum_bias_deviation", default=torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("total", default=torch.tensor(0), dist_reduce_fx="sum")

    def update(self, preds: torch.Tensor, target: torch.Tensor):
        self.sum_bias_deviation += (preds - target).sum()
        self.total += target.numel()

    def compute(self):
        return self.sum_bias_deviation / self.total
