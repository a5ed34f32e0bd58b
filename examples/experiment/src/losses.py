"""Losses: metrics whose value for a batch can be differentiated."""

import torch
from torch.nn.functional import huber_loss
from torchmetrics import Metric


class HuberLossMetric(Metric):
    """Squared for small errors, linear beyond `delta`."""

    def __init__(self, delta: float = 1.0):
        super().__init__()
        self.delta = delta
        self.add_state("total", default=torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("count", default=torch.tensor(0), dist_reduce_fx="sum")

    def update(self, preds: torch.Tensor, target: torch.Tensor):
        self.total = self.total + huber_loss(preds, target, reduction="sum", delta=self.delta)
        self.count = self.count + target.numel()

    def compute(self):
        return self.total / self.count
