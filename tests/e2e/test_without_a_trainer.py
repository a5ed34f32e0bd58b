"""Scripts that train by themselves: under plain python, and under torchrun."""

import json
import subprocess
import sys
import textwrap

import paceline
from paceline.runs import load_run

TRAIN = """
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline


def train(num_epochs):
    torch.manual_seed(0)
    model = paceline.prepare_model(nn.Linear(1, 1))
    data = torch.arange(8.0).reshape(8, 1)
    loader = paceline.prepare_data_loader(DataLoader(TensorDataset(data), batch_size=2))
    checkpoint = paceline.load_checkpoint()
    first = checkpoint["epoch"] if checkpoint else 0
    if checkpoint:
        model.load_state_dict(checkpoint["model"])
    for epoch in range(first + 1, num_epochs + 1):
        seen = []
        for (x,) in loader:
            seen += x.flatten().tolist()
            model.zero_grad()
            (model(x) ** 2).mean().backward()
            with torch.no_grad():  # by hand: an optimizer's first step takes seconds to import
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
        paceline.report(epoch=epoch, seen=str(seen), workers=paceline.world_size())
        paceline.save_checkpoint(epoch=epoch, model=model.state_dict())
    return type(model).__name__
"""


def run_script(tmp_path, body, *launcher, train=TRAIN):
    script = tmp_path / "train.py"
    script.write_text(train + textwrap.dedent(body))
    return subprocess.run(
        [sys.executable, *launcher, str(script)], capture_output=True, text=True, timeout=120, check=False
    )


def test_plain_script_leaves_a_run(tmp_path):
    done = run_script(
        tmp_path,
        """
        with paceline.record_run({"lr": 0.1}, logdir="plain") as run_dir:
            train(3)
        with paceline.record_run(checkpoint=paceline.load_run(run_dir).latest_checkpoint_path, logdir="plain") as again:
            train(5)
        print(run_dir)
        """,
    )
    assert done.returncode == 0, done.stderr
    run = load_run(done.stdout.strip())
    assert (run.status.state, run.config) == ("SUCCEEDED", {"lr": 0.1})
    assert run.metrics["epoch"].tolist() == [1, 2, 3]
    assert [paceline.read_checkpoint(info.path)["epoch"] for info in run.checkpoints] == [1, 2, 3]
    assert load_run(run.path.parent / "run_002").metrics["epoch"].tolist() == [4, 5]


def test_script_that_fails(tmp_path):
    done = run_script(
        tmp_path,
        """
        import paceline

        with paceline.record_run(logdir="fails") as run_dir:
            paceline.report(epoch=1)
            print(run_dir, flush=True)
            raise KeyError("lr")
        """,
        train="",
    )
    assert done.returncode == 1
    status = load_run(done.stdout.strip()).status
    assert (status.state, status.reason) == ("FAILED", "KeyError: 'lr'")


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def test_torchrun_script_leaves_the_run_of_all_its_ranks(tmp_path):
    """Before there is a process group and in one; continued from a checkpoint, with each rank's own generators."""
    done = run_script(
        tmp_path,
        """
        import contextlib
        import json
        import os

        import torch.distributed as dist
        from paceline import core

        rank = int(os.environ["RANK"])
        with paceline.record_run(logdir="torchrun") as before:
            paceline.report(x=rank)
        dist.init_process_group("gloo")
        os.environ["USE_TORCH_DISTRIBUTED"] = "true"
        context = core.DistributedContext.from_torch_distributed(chief_ip="localhost")
        with core.init(distributed=context, logdir="torchrun") as inside:
            kind = train(2)
            paceline.enable_reproducibility(rank)
            paceline.save_checkpoint(epoch=2, model={}, per_rank={"rank": rank})
            drawn = torch.rand(1).item()
            there = [inside.distributed.allgather(rank), inside.distributed.broadcast(kind)]
            mine = paceline.load_checkpoint().per_rank
        path = paceline.load_run(inside.run_dir).latest_checkpoint_path
        with paceline.record_run(checkpoint=path, logdir="torchrun"):
            paceline.enable_reproducibility(rank)
            paceline.load_checkpoint()
            again = torch.rand(1).item()
        told = (rank, paceline.local_rank(), kind, there, mine, drawn == again, drawn)
        everybody = [None, None]
        # From here on, threads of gloo are late with all they do.
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):  # one of a run that has just ended
                if thread != str(os.getpid()):
                    os.sched_setaffinity(int(thread), os.sched_getaffinity(0))
                    os.sched_setscheduler(int(thread), os.SCHED_IDLE, os.sched_param(0))
        dist.all_gather_object(everybody, told)
        if rank == 0:
            print(json.dumps([everybody, str(before), str(inside.run_dir)]))
        dist.destroy_process_group()
        """,
        *TORCHRUN,
    )
    assert done.returncode == 0, done.stderr
    everybody, before, run_dir = json.loads(done.stdout.strip().splitlines()[-1])
    there = [[0, 1], "SharedModel"]
    assert [one[:-1] for one in everybody] == [
        [0, 0, "SharedModel", there, {"rank": 0}, True],
        [1, 1, "SharedModel", there, {"rank": 1}, True],
    ]
    assert everybody[0][-1] != everybody[1][-1], "each rank has its own random numbers"
    assert (load_run(before).status.state, len(load_run(before).metrics)) == ("SUCCEEDED", 2)
    run = load_run(run_dir)
    assert set(run.metrics["seen"]) == {"[0.0, 2.0, 4.0, 6.0]", "[1.0, 3.0, 5.0, 7.0]"}, "of both ranks"
    assert set(run.metrics["workers"]) == {2}
    assert len(run.checkpoints) == 3
    assert run.checkpoints[-1].ranks == (0, 1)


def test_torchrun_names_the_rank_that_was_killed(tmp_path):
    done = run_script(
        tmp_path,
        """
        import os
        import signal

        import paceline
        import torch.distributed as dist
        import torch

        dist.init_process_group("gloo")
        with paceline.record_run(logdir="killed"):
            for step in range(100):
                paceline.report(step=step)
                if step == 3 and dist.get_rank() == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                dist.all_reduce(torch.ones(1))
        """,
        *TORCHRUN,
        train="",
    )
    assert done.returncode == 1
    status = load_run("killed").status
    assert status.state == "FAILED"
    assert status.reason.startswith("WorkersLostError: Rank 1 is gone")
