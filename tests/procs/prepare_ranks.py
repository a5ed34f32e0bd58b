"""What the ranks of test_prepare_ddp.py run."""

import os
import signal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from paceline.prepare import (
    accelerate,
    backward,
    enable_reproducibility,
    prepare_data_loader,
    prepare_model,
    prepare_optimizer,
    rng_state,
    set_rng_state,
)

NUM_EPOCHS = 3


def regression(num_workers=0, batch_size=4):
    x = torch.arange(32, dtype=torch.float64).reshape(32, 1) / 32
    data = TensorDataset(x, 3 * x)
    return prepare_data_loader(DataLoader(data, batch_size=batch_size, shuffle=True, num_workers=num_workers))


def train(folder=None, die_at=None):
    """Train with dropout, from what a rank that died has left in the folder, if there is one; if `die_at` is given,
    leave it there after that step and be killed."""
    enable_reproducibility(5)
    model = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.5), nn.Linear(8, 1)).double()
    model = prepare_model(model)
    optimizer = prepare_optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    loader = regression(num_workers=1)
    losses, rank = [], dist.get_rank()
    if folder and not die_at:
        state = torch.load(folder / f"state_{rank}", weights_only=False)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(state["loader"])
        set_rng_state(state["rng"])
        losses = state["losses"]
    for _ in range(loader.state_dict()["epoch"], NUM_EPOCHS):
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()
            losses.append(loss.item())
            if len(losses) == die_at:
                save_and_die(folder / f"state_{rank}", model, optimizer, loader, losses)
    return {"losses": losses, "weights": [p.detach() for p in model.parameters()]}


def save_and_die(path, model, optimizer, loader, losses):
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses}
    torch.save(state | {"loader": loader.state_dict(), "rng": rng_state()}, path)
    dist.barrier()  # every rank has saved
    os.kill(os.getpid(), signal.SIGKILL)


def one_epoch(batch_size):
    """Plain gradient descent from zero: two ranks with half the batch make the same steps as one."""
    model = nn.Linear(1, 1).double()
    with torch.no_grad():
        model.weight.zero_(), model.bias.zero_()
    model = prepare_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    seen = []
    for x, y in regression(batch_size=batch_size):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        seen += (x * 32).long().flatten().tolist()
    return {"seen": seen, "weights": [p.detach() for p in model.parameters()]}


def shapes():
    """Facts about what prepare_model made, to be looked at in the test."""
    plain = nn.Linear(2, 2)
    keys = list(plain.state_dict())
    model, loss, frozen = accelerate(plain, nn.MSELoss(), nn.Linear(1, 1).requires_grad_(False), mixed_precision=True)
    output = model(torch.ones(1, 2))
    backward(loss(output, torch.full((1, 2), float(dist.get_rank()))))
    kwargs = prepare_model(nn.Linear(2, 2), ddp_kwargs={"find_unused_parameters": True})
    return {
        "wrapped": [isinstance(made, DistributedDataParallel) for made in (model, loss, frozen)],
        "again": prepare_model(model) is model,
        "keys": list(model.module.state_dict()) == keys,
        "dtype": output.dtype,
        "narrow": not torch.equal(output, nn.functional.linear(torch.ones(1, 2), plain.weight, plain.bias)),
        "grad": plain.weight.grad,
        "kwargs": kwargs.find_unused_parameters,
    }
