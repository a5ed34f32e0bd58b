"""What the ranks of test_faults.py do. Each worker that starts imports this module, and so it imports little."""

import os
import signal

import torch

import paceline


def train_with_trouble(config):
    """Five steps of an all-reduce, a report and a checkpoint each; `trouble` strikes at step 3, once."""
    checkpoint = paceline.load_checkpoint() or {"step": 0, "total": 0.0}
    first_attempt = checkpoint["step"] == 0
    total = checkpoint["total"]
    for step in range(checkpoint["step"] + 1, 6):
        if first_attempt and step == 3:
            paceline.load_checkpoint()  # what was saved so far is committed
            if paceline.world_rank() == config.get("rank", 1):
                config["trouble"]()
        value = torch.ones(1) * step
        torch.distributed.all_reduce(value)
        total += value.item()
        paceline.report(step=step, total=total)
        paceline.save_checkpoint(step=step, total=total)
    return total


def kill_self():
    os.kill(os.getpid(), signal.SIGKILL)


def segfault():
    import ctypes

    ctypes.string_at(0)


def leave():
    os._exit(1)
