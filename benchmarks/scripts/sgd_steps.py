"""Steps of a model on two workers, by DistributedSGD or a peer: `sgd_steps.py SPEC`; under torchrun for plain DDP."""

import json
import os
import signal
import sys
import time

import numpy as np
import torch
from torch import nn

from benchmarks.marks import mark


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        parts = [part for _ in range(2) for part in (nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(8, width))]
        self.body = nn.Sequential(*parts[:2], nn.ReLU(), *parts[2:])

    def forward(self, x):
        return torch.relu(x + self.body(x))


def resnet():
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        *(Residual(32) for _ in range(4)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


def mlp():
    """25 million parameters."""
    width = 2040
    layers = [part for _ in range(6) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, 10))


MODELS = {"resnet": (resnet, (8, 3, 32, 32)), "mlp": (mlp, (32, 2040))}


def batch_of(name, rank):
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(MODELS[name][1], generator=generator)
    return x, torch.randint(10, (len(x),), generator=generator)


class Bench:
    """As DistributedSGD takes it."""

    def __init__(self, name, rank):
        torch.manual_seed(0)
        self.module = MODELS[name][0]()
        self.x, self.y = batch_of(name, rank)

    def get_loss(self):
        return nn.functional.cross_entropy(self.module(self.x), self.y)

    def get_optimizer(self):
        return torch.optim.SGD(self.module.parameters(), lr=1e-3)


class Empty:
    """Nothing to compute, and nothing to train."""

    def get_weights(self):
        return {}

    def set_weights(self, weights):
        pass

    def loss_and_grad(self):
        return 0.0, {}

    def apply_gradients(self, gradients):
        pass


def timed(step, spec):
    for _ in range(spec["num_warm"]):
        step()
    for _ in range(spec["num_rounds"]):
        begin = time.perf_counter()
        for _ in range(spec["num_steps"]):
            step()
        mark("steps", seconds=(time.perf_counter() - begin) / spec["num_steps"])


def ours(spec):
    from paceline.sgd import DistributedSGD

    name = spec["model"]
    creator = (lambda worker: Empty()) if name == "empty" else (lambda worker: Bench(name, worker))
    more = {"engine": spec["engine"], "strategy": spec["strategy"], "verbose": False}
    with DistributedSGD(creator, num_workers=2, use_cpus=True, **more) as sgd:
        timed(sgd.step, spec)


def ddp(spec):
    """One mark, of rank 0: the steps are collective."""
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    bench = Bench(spec["model"], rank)
    bench.module = nn.parallel.DistributedDataParallel(bench.module)
    optimizer = bench.get_optimizer()

    def step():
        optimizer.zero_grad()
        loss = bench.get_loss()
        loss.backward()
        optimizer.step()
        return loss.item()

    if rank:
        for _ in range(spec["num_warm"] + spec["num_rounds"] * spec["num_steps"]):
            step()
    else:
        timed(step, spec)
    torch.distributed.destroy_process_group()


def actors(spec):
    """Gather on the driver, as somebody writes it with plain Ray."""
    import ray

    from benchmarks.local_ray import local_ray

    name = spec["model"]

    class Worker:
        def __init__(self, rank):
            torch.set_num_threads(1)
            self.bench = Bench(name, rank)
            self.optimizer = self.bench.get_optimizer()

        def compute(self):
            self.optimizer.zero_grad()
            loss = self.bench.get_loss()
            loss.backward()
            return loss.item(), [weight.grad.numpy() for weight in self.bench.module.parameters()]

        def apply(self, gradients):
            for weight, gradient in zip(self.bench.module.parameters(), gradients, strict=True):
                weight.grad = torch.from_numpy(gradient.copy())
            self.optimizer.step()

    with local_ray(2):
        workers = [ray.remote(Worker).options(num_cpus=1).remote(rank) for rank in range(2)]

        def step():
            computed = ray.get([worker.compute.remote() for worker in workers])
            mean = ray.put([np.mean(each, axis=0) for each in zip(*(one for _, one in computed), strict=True)])
            ray.get([worker.apply.remote(mean) for worker in workers])

        timed(step, spec)


def kill(spec):
    """From the SIGKILL of a worker to the next finished step."""
    from paceline.sgd import DistributedSGD

    with DistributedSGD(lambda worker: Bench("resnet", worker), 2, use_cpus=True, verbose=False, max_retries=-1) as sgd:
        for _ in range(spec["num_rounds"]):
            for _ in range(spec["num_warm"]):
                sgd.step()
            pid = sgd.foreach_worker(lambda models: os.getpid())[1]
            begin = time.perf_counter()
            os.kill(pid, signal.SIGKILL)
            sgd.step()
            mark("steps", seconds=time.perf_counter() - begin)


def main():
    spec = json.loads(sys.argv[1])
    if spec.get("engine") == "ray":
        from benchmarks.local_ray import local_ray

        with local_ray(2):
            ours(spec)
    else:
        {"ours": ours, "ddp": ddp, "actors": actors, "kill": kill}[spec["kind"]](spec)


if __name__ == "__main__":
    main()
