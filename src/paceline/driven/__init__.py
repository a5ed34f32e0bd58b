"""A loop on the driver, and a model on the workers: `output = model(batch)`, `loss.backward()`, `optimizer.step()`.

    with WorkerGroup(num_workers=2) as worker_group:
        model = worker_group.distribute(nn.Linear(4, 1))
        optimizer = worker_group.optimizer(torch.optim.SGD, model, lr=0.1)
        for inputs, labels in worker_group.batches(dataset, batch_size=32):
            ...

What the loop holds are `Value`s: names of what every rank has of its own. See docs/driven-loop.md.
"""

from paceline.driven.group import WorkerGroup, distributed_training
from paceline.driven.parts import Batches, Model, Optimizer
from paceline.driven.value import Value

__all__ = ["Batches", "Model", "Optimizer", "Value", "WorkerGroup", "distributed_training"]
