"""The one training that every system runs: a small classifier under DDP, a few milliseconds a step on one thread."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

NUM_WORKERS = 2
_NUM_FEATURES, _NUM_HIDDEN, _NUM_CLASSES, _BATCH_SIZE = 256, 512, 10, 32


class Training:
    """One rank's side of it. Making it is collective, and so is every step."""

    def __init__(self) -> None:
        if (dist.get_world_size(), torch.get_num_threads()) != (NUM_WORKERS, 1):
            raise RuntimeError(
                f"{dist.get_world_size()} workers with {torch.get_num_threads()} threads each; "
                f"to be comparable, there have to be {NUM_WORKERS} with one."
            )
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(_NUM_FEATURES, _NUM_HIDDEN),
            nn.ReLU(),
            nn.Linear(_NUM_HIDDEN, _NUM_HIDDEN),
            nn.ReLU(),
            nn.Linear(_NUM_HIDDEN, _NUM_CLASSES),
        )
        self.model = DistributedDataParallel(model)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        torch.manual_seed(dist.get_rank())
        self._inputs = torch.randn(_BATCH_SIZE, _NUM_FEATURES)
        self._labels = torch.randint(_NUM_CLASSES, (_BATCH_SIZE,))

    def step(self) -> float:
        self._optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(self._inputs), self._labels)
        loss.backward()
        self._optimizer.step()
        return loss.item()

    def state(self) -> dict[str, Any]:
        return self.model.module.state_dict()

    def load(self, state: dict[str, Any]) -> None:
        self.model.module.load_state_dict(state)
