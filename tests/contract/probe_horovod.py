"""What the suites for backends have to know of Horovod."""

from probing import LR, MOMENTUM, Probe, rows

import paceline
from paceline import HorovodConfig


def place():
    import horovod.torch as hvd

    return (hvd.rank(), hvd.size()) if hvd.is_initialized() else None


def meet():
    import horovod.torch as hvd
    import torch

    return hvd.allreduce(torch.tensor(hvd.rank() + 1), op=hvd.Sum).item()


def train(config):
    import horovod.torch as hvd
    import torch

    hvd.init()
    x, y = (torch.from_numpy(part[hvd.rank() :: hvd.size()]) for part in rows())
    model = torch.nn.Linear(3, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    done = 0
    if checkpoint := paceline.load_checkpoint():
        done = checkpoint["step"]
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for step in range(done + 1, config["steps"] + 1):
        loss = ((model(x)[:, 0] - y) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        paceline.report(step=step, loss=hvd.allreduce(loss.detach(), name="loss").item())
        paceline.save_checkpoint(step=step, model=model.state_dict(), optimizer=optimizer.state_dict())
        config["hook"](step)
    return model.weight[0].tolist()


def spoil():
    import horovod.torch as hvd

    hvd.shutdown()


PROBE = Probe(config=HorovodConfig, place=place, meet=meet, spoil=spoil, rejoins=True, train=train)
