"""A driven loop on real workers, on each engine."""

import os
import signal
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.driven import WorkerGroup
from paceline.errors import TrainerStateError, WorkersLostError

INPUTS = torch.arange(24.0).reshape(12, 2) / 24
LABELS = INPUTS.sum(1, keepdim=True)


@pytest.fixture(scope="module", params=["local", "ray"])
def worker_group(request, lasts):
    resources = {}
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
        resources = {"cpus_per_worker": 0, "resources_per_worker": {"stays": 1}}
    with WorkerGroup(num_workers=2, engine=request.param, **resources) as made, lasts(made.pipeline._workers):
        yield made


def test_loop_trains_as_one_process_on_the_whole_batch(worker_group):
    torch.manual_seed(0)
    bare = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    model = worker_group.distribute(bare)
    optimizer = worker_group.optimizer(torch.optim.SGD, model, lr=0.1, momentum=0.9)
    losses, expected = [], []
    for _epoch in range(2):
        for inputs, labels in worker_group.batches(TensorDataset(INPUTS, LABELS), global_batch_size=6):
            optimizer.zero_grad()
            output = model(inputs)
            loss = worker_group.apply(nn.functional.mse_loss, output, labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    own = torch.optim.SGD(bare.parameters(), lr=0.1, momentum=0.9)
    for _epoch in range(2):
        for inputs, labels in zip(INPUTS.split(6), LABELS.split(6), strict=True):
            own.zero_grad()
            loss = nn.functional.mse_loss(bare(inputs), labels)
            loss.backward()
            own.step()
            expected.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-5)
    replicas = worker_group.apply(lambda: [p.data for p in model.parameters()]).get()
    for own_weight, *weights in zip(bare.parameters(), *replicas, strict=True):
        assert torch.equal(*weights)
        assert torch.allclose(weights[0], own_weight.data, rtol=1e-5)


def test_ranks_read_their_own_rows_and_numbers_are_the_mean(worker_group):
    rows = [inputs.get() for inputs, _ in worker_group.batches(TensorDataset(INPUTS, LABELS), batch_size=3)]
    assert torch.equal(torch.cat([part for ranks in rows for part in ranks]), INPUTS)
    rank = worker_group.apply(paceline.world_rank)
    assert (rank.get(), rank.item()) == ([0, 1], 0.5)
    assert str(worker_group.apply(lambda: f"I am {rank}")) == "rank 0: I am 0\nrank 1: I am 1"


def test_driver_waits_for_nothing_before_it_asks(worker_group, tmp_path):
    """The workers wait for a file that the driver makes after it has sent all commands."""
    gate = tmp_path / "gate"
    worker_group.apply(wait_until_exists, str(gate))
    total = worker_group.apply(lambda: 0)
    for _ in range(50):
        total = total + 1
    gate.touch()
    assert total.item() == 50


def wait_until_exists(path):
    import time

    deadline = time.monotonic() + 60
    while not os.path.exists(path):
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_all_ranks_raise_and_the_group_lives_on(worker_group):
    kept = worker_group.apply(lambda: 4)
    made = worker_group.apply(lambda: torch.zeros(2) @ torch.zeros(3))
    with pytest.raises(RuntimeError, match="inconsistent tensor size") as caught:
        made.get()
    notes = "".join(caught.value.__notes__)
    assert "The driver had sent it from" in notes
    assert "made = worker_group.apply(lambda: torch.zeros(2) @ torch.zeros(3))" in notes
    with pytest.raises(TrainerStateError, match="was never made"):
        made.get()
    assert kept.get() == [4, 4]


# --- groups that end --------------------------------------------------------------------------------------------------


def test_worker_is_killed():
    with WorkerGroup(num_workers=2, engine="local") as worker_group:
        model = worker_group.distribute(nn.Linear(2, 1))
        pid = worker_group.apply(os.getpid).get()[1]
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkersLostError, match=r"Rank 1 was killed by SIGKILL.*test_driven\.py, line"):
            worker_group.apply(lambda: model(INPUTS).sum().backward()).get()
        with pytest.raises(TrainerStateError, match="has ended, since rank 1 was killed by SIGKILL"):
            model.state_dict()


def test_one_rank_raises_while_the_other_waits_for_it():
    with WorkerGroup(num_workers=2, engine="local") as worker_group:
        model = worker_group.distribute(nn.Linear(2, 1))
        outputs = model(INPUTS)
        loss = worker_group.apply(lambda: outputs.sum() / (1 - paceline.world_rank() or int("one")))
        loss.backward()
        with pytest.raises(ValueError, match="invalid literal") as caught:
            loss.item()
        assert "Raised in the training function on rank 1" in caught.value.__notes__[0]
        assert "loss = worker_group.apply(" in caught.value.__notes__[1]
        assert "The workers have ended" in caught.value.__notes__[2]
        with pytest.raises(TrainerStateError, match="since rank 1 raised ValueError and others did not"):
            loss.item()


def test_workers_hang(tmp_path, wait_until):
    with WorkerGroup(num_workers=2, engine="local", hang_timeout_s=0.2) as worker_group:
        stuck = worker_group.apply(get_stuck, str(tmp_path))
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
        with pytest.raises(WorkersLostError, match=r"silent for 0.2 s.*stuck = worker_group.apply") as caught:
            stuck.get()
        assert "".join(caught.value.__notes__).count("in get_stuck") == 2


def get_stuck(directory):
    (Path(directory) / str(paceline.world_rank())).touch()
    signal.pause()


def test_a_fork_of_the_driver():
    """Its questions would go to the workers of another process."""
    with WorkerGroup(num_workers=0) as group:
        value = group.apply(lambda: 3.0)
        group.wait()
        if (pid := os.fork()) == 0:
            try:
                float(value)
            except TrainerStateError as error:
                os._exit(3 if "is a fork" in str(error) else 2)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
        assert float(value) == 3.0
