"""What the suites for backends have to know of torch."""

from probing import LR, MOMENTUM, Probe, rows

import paceline
from paceline import TorchConfig


def place():
    import torch.distributed as dist

    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None


def meet():
    import torch
    import torch.distributed as dist

    total = torch.tensor(dist.get_rank() + 1)
    dist.all_reduce(total)
    return total.item()


def train(config):
    import torch
    import torch.distributed as dist

    x, y = (torch.from_numpy(part[paceline.world_rank() :: paceline.world_size()]) for part in rows())
    model = torch.nn.Linear(3, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    done = 0
    if checkpoint := paceline.load_checkpoint():
        done = checkpoint["step"]
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    for step in range(done + 1, config["steps"] + 1):
        loss = ((ddp(x)[:, 0] - y) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach())
        paceline.report(step=step, loss=loss.item() / dist.get_world_size())
        paceline.save_checkpoint(step=step, model=model.state_dict(), optimizer=optimizer.state_dict())
        config["hook"](step)
    return model.weight[0].tolist()


def spoil():
    import torch.distributed as dist

    dist.destroy_process_group()


PROBE = Probe(config=TorchConfig, place=place, meet=meet, spoil=spoil, rejoins=True, train=train)
