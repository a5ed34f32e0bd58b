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
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
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
            optimizer.zero_grad()
            (model(x) ** 2).mean().backward()
            optimizer.step()
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


def test_torchrun_script_knows_its_ranks_and_rank_0_records(tmp_path):
    done = run_script(
        tmp_path,
        """
        import torch.distributed as dist

        dist.init_process_group("gloo")
        with paceline.record_run(logdir="torchrun") as run_dir:
            kind = train(2)
        everybody = [None, None]
        dist.all_gather_object(everybody, (paceline.world_rank(), paceline.local_rank(), kind, run_dir is None))
        if paceline.world_rank() == 0:
            print(__import__("json").dumps([everybody, str(run_dir)]))
        dist.destroy_process_group()
        """,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
    )
    assert done.returncode == 0, done.stderr
    everybody, run_dir = json.loads(done.stdout.strip().splitlines()[-1])
    assert everybody == [[0, 0, "SharedModel", False], [1, 1, "SharedModel", True]]
    run = load_run(run_dir)
    assert run.metrics["seen"].tolist() == ["[0.0, 2.0, 4.0, 6.0]"] * 2, "every second sample"
    assert run.metrics["workers"].tolist() == [2, 2]
    assert len(run.checkpoints) == 2
