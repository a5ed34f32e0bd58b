"""Models for the tests of DistributedSGD: small ones, with whatever is awkward, and data of which each replica has a
part. `Whole` is all of that in one process, with plain torch."""

import hashlib
import os
import signal
import threading
from pathlib import Path

import numpy as np
import torch
from torch import nn

from paceline.sgd import NumpyModel, TorchModel

NUM_PARTS = 4


def rows(part, num_parts=NUM_PARTS):
    """One part of 32 rows."""
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(32, 5, generator=generator)
    targets = inputs.sum(1, keepdim=True) + 0.1 * torch.randn(32, 1, generator=generator)
    return inputs.chunk(num_parts)[part], targets.chunk(num_parts)[part]


class Odd(nn.Module):
    """Odd sizes, three dtypes, a scalar, a weight that is never used and one that is not trained."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.turn = nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.first = nn.Linear(5, 7)
        self.unused = nn.Linear(3, 3)
        self.second = nn.Linear(7, 1).double()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, inputs):
        turned = (inputs * self.turn).abs()
        return self.second((torch.tanh(self.first(turned)) * self.scale).double())


class OddModel(TorchModel):
    def __init__(self, part, num_parts=NUM_PARTS, seed=None):
        self.module = Odd(part if seed is None else seed)
        self.part = part
        self.inputs, self.targets = rows(part, num_parts)
        self.num_losses = 0

    def get_loss(self):
        self.num_losses += 1
        return nn.functional.mse_loss(self.module(self.inputs), self.targets.double())

    def get_optimizer(self):
        return torch.optim.SGD(self.module.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)

    def get_metrics(self):
        return {"part": self.part, "twice": torch.tensor(2.0 * self.part)}

    def validate(self):
        return {"distance": self.module.scale.item() + self.part}


def whole(num_steps):
    """The weights after so many steps of one process on all rows."""
    model = OddModel(0, num_parts=1)
    optimizer = model.get_optimizer()
    for _ in range(num_steps):
        optimizer.zero_grad()
        model.get_loss().backward()
        optimizer.step()
    return {name: value.numpy() for name, value in model.module.state_dict().items()}


def creator(devices_per_worker, num_workers=2):
    """With a seed of its own for each: the weights of the first have to reach all."""
    num_parts = devices_per_worker * num_workers
    return lambda worker, device: OddModel(worker * devices_per_worker + device, num_parts)


def digest(model):
    weights = model.module.state_dict().values()
    return hashlib.sha256(b"".join(value.numpy().tobytes() for value in weights)).hexdigest()


class Forking(NumpyModel):
    """In every step, a process is forked that comes back from the model as if it were the worker, or ends in its own
    way. Where it is in its data is told by an object of a class that only this process has."""

    learning_rate = 1.0

    def __init__(self, how):
        self.weights, self.how, self.num_steps = {"a": np.zeros(1)}, how, 0

    def loss_and_grad(self):
        self.num_steps += 1
        if (pid := os.fork()) == 0:
            self.how()
        else:
            self.status = os.waitpid(pid, 0)[1]
        return float(self.num_steps), {"a": np.ones(1)}

    def get_position(self):
        class Place:
            def __init__(self, at):
                self.at = at

        return Place(self.num_steps)

    def set_position(self, place):
        self.num_steps = place.at


class Splitting(OddModel):
    """In the method that is named, a process is forked which comes back from it as if it were the worker, and whose
    weights are other ones. A child that goes on meets its parent's collectives."""

    def __init__(self, part, num_parts):
        super().__init__(part, num_parts)
        self.where, self.codes = None, []
        self.module.scale.register_hook(lambda gradient: self.split("backward"))

    def split(self, here):
        if here != self.where:
            return
        if (pid := os.fork()) == 0:
            with torch.no_grad():
                self.module.scale.fill_(100.0)
        else:
            self.codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    def get_loss(self):
        self.split("get_loss")
        return super().get_loss()

    def get_metrics(self):
        self.split("get_metrics")
        return super().get_metrics()

    def get_position(self):
        self.split("get_position")

    def set_position(self, position):
        pass


class Line(NumpyModel):
    """Two weights, of which one has no gradient on odd parts; with a momentum, which is a state."""

    def __init__(self, part):
        self.weights = {"slope": np.full(3, 1.0 + part), "offset": np.zeros((), np.float32)}
        self.part = part
        self.momentum = {name: np.zeros_like(value) for name, value in self.weights.items()}

    def loss_and_grad(self):
        error = self.weights["slope"] - self.part
        gradients = {"slope": 2 * error, "offset": None if self.part % 2 else np.float32(1)}
        return (error**2).sum(), gradients, {"part": self.part}

    def apply_gradients(self, gradients):
        for name, gradient in gradients.items():
            if gradient is not None:
                self.momentum[name] = 0.5 * self.momentum[name] + gradient
                self.weights[name] = self.weights[name] - (0.1 * self.momentum[name]).astype(gradient.dtype)

    def get_state(self):
        return self.momentum

    def set_state(self, state):
        self.momentum = state


class Counting(NumpyModel):
    """Reads its data in order: the gradient of step k is k, as long as nothing is left out or read twice."""

    learning_rate = 1.0

    def __init__(self):
        self.weights = {"sum": np.zeros(1)}
        self.next = 0

    def loss_and_grad(self):
        self.next += 1
        return 0.0, {"sum": np.array([-float(self.next)])}

    def get_position(self):
        return self.next

    def set_position(self, position):
        self.next = position


class Straying(Counting):
    """A process that it has forked comes back from the model with other gradients, when those of this one are where
    the others read them."""

    def loss_and_grad(self):
        is_told, self.tell = os.pipe()
        self.child = os.fork()
        if self.child == 0:
            os.close(self.tell)
            os.read(is_told, 1)
            return 0.0, {"sum": np.array([1000.0])}
        os.close(is_told)
        return super().loss_and_grad()

    def get_position(self):
        os.close(self.tell)
        os.waitpid(self.child, 0)
        return super().get_position()


class Dying(Counting):
    """Rank 1 kills itself in the third step, once."""

    def __init__(self, rank, flag):
        super().__init__()
        self.rank, self.flag = rank, Path(flag)

    def loss_and_grad(self):
        if self.rank == 1 and self.next == 2 and not self.flag.exists():
            self.flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss_and_grad()


class DyingLate(Counting):
    """Rank 1 kills itself, once, when it is to apply the third mean, which the other has: the step stands."""

    def __init__(self, rank, flag):
        super().__init__()
        self.rank, self.flag = rank, Path(flag)

    def apply_gradients(self, gradients):
        if self.rank == 1 and self.next == 3 and not self.flag.exists():
            self.flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        self.weights = {"sum": self.weights["sum"] - gradients["sum"]}


class Untold(Counting):
    """Tells what nobody else can read."""

    def get_metrics(self):
        return {"odd": Unreadable()}


class Unreadable:
    def __reduce__(self):
        return divmod, (1, 0)


class Ringing(Counting):
    """Sends the driver a signal in the middle of its step."""

    def __init__(self, driver):
        super().__init__()
        self.driver = driver

    def loss_and_grad(self):
        os.kill(self.driver, signal.SIGALRM)
        return super().loss_and_grad()


class Stuck(Counting):
    """Does not come back."""

    def loss_and_grad(self):
        threading.Event().wait()


class Raising(Counting):
    def __init__(self, rank):
        super().__init__()
        self.rank = rank

    def loss_and_grad(self):
        if self.rank == 1 and self.next == 1:
            raise FloatingPointError("the loss is not finite")
        return super().loss_and_grad()
