"""A long run in which workers are killed and paused and the disk refuses writes: in the end, as if nothing had been.

What happens, and when, is drawn from a seed; each blow waits for some progress after the last, so it ends.
"""

import contextlib
import os
import random
import resource
import signal
import threading

import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline import RayEngine, SGDCallback, Trainer
from paceline.checkpoints import load
from paceline.errors import CheckpointWriteError

NUM_STEPS = 600
SAVE_EVERY = 25


def train(config):
    """Fits a plane with momentum. Every rank draws its own data, and as much of it as it likes: an attempt computes
    what another did only if it goes on with the random numbers of each rank."""
    paceline.enable_reproducibility(0)
    model = DistributedDataParallel(torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for _ in range(1 + paceline.world_rank()):
        torch.rand(1), np.random.rand(), random.random()  # from here on, the ranks' numbers differ
    checkpoint = paceline.load_checkpoint() or {"step": 0}
    if checkpoint["step"]:
        model.module.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    disk = Disk(config["refusals"])
    for step in range(checkpoint["step"] + 1, NUM_STEPS + 1):
        x = torch.rand(8, 3) + np.random.rand() + random.random()
        torch.rand(paceline.world_rank())
        loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        paceline.report(step=step, loss=loss.item())
        disk.set_mood(step)
        if step % SAVE_EVERY == 0:
            # of the one before: the disk refused too often. This one is saved all the same
            with contextlib.suppress(CheckpointWriteError):
                paceline.save_checkpoint(step=step, model=model.module.state_dict(), optimizer=optimizer.state_dict())
    disk.set_mood(None)
    return [parameter.tolist() for parameter in model.module.parameters()]


class Disk:
    """Refuses this process's writes to files, as the kernel does at a limit, for some steps from each of `refusals`."""

    def __init__(self, refusals):
        self._refusals = refusals
        self._limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def set_mood(self, step):
        refuses = step is not None and any(first <= step < first + length for first, length in self._refusals)
        soft = 0 if refuses else self._limits[1]
        if resource.getrlimit(resource.RLIMIT_FSIZE)[0] != soft:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, self._limits[1]))


class Chaos(SGDCallback):
    """Kills and pauses workers, some steps apart."""

    def __init__(self, trainer, seed, num_blows):
        self.trainer, self.random, self.blows = trainer, random.Random(seed), []
        self.num_blows, self.next_step, self.reached = num_blows, 50, 0
        self.paused = []

    def handle_result(self, results, **info):
        self.reached = max(self.reached, results[0]["step"])
        if self.reached >= self.next_step and len(self.blows) < self.num_blows:
            self.next_step = self.reached + self.random.randint(40, 100)
            self.strike(self.random.choice(["kill", "kill", "pause", "hang"]), self.random.choice([0, 1]))

    def strike(self, blow, rank):
        self.blows.append(blow)
        pid = self.trainer._crew.group.infos[rank].pid
        send(pid, signal.SIGKILL if blow == "kill" else signal.SIGSTOP)
        if blow == "pause":
            timer = threading.Timer(self.random.uniform(0.05, 0.4), send, [pid, signal.SIGCONT])
            timer.start()
            self.paused.append(timer)

    def finish_training(self, error=False, **info):
        for timer in self.paused:
            timer.join()


def send(pid, number):
    """If it is still there: reports of a worker that was killed before may be on their way for a while."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


@pytest.fixture(scope="module")
def undisturbed():
    """What the function returns, and its run. It is the same on every engine."""
    with Trainer(num_workers=2, engine="local") as trainer:
        return trainer.run(train, {"refusals": []}), paceline.load_run(trainer.latest_run_dir)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("engine", "num_blows"), [("local", 5), ("ray", 3)])
def test_disturbed_run_equals_an_undisturbed_one(engine, num_blows, undisturbed):
    engine = RayEngine(spare_workers=1) if engine == "ray" else engine
    seed = 30  # of which each kind of blow comes soon, on either rank
    refusals = [(step, 3) for step in random.Random(seed).sample(range(SAVE_EVERY, NUM_STEPS, SAVE_EVERY), 6)]
    expected, calm = undisturbed
    with Trainer(num_workers=2, engine=engine, max_retries=-1, hang_timeout_s=4) as trainer:
        chaos = Chaos(trainer, seed, num_blows)
        values = trainer.run(train, {"refusals": refusals}, callbacks=[chaos])
    run = paceline.load_run(trainer.latest_run_dir)
    assert len(chaos.blows) == num_blows, "it was disturbed"
    assert set(chaos.blows) == {"kill", "pause", "hang"}
    assert any(event["kind"] == "restart" for event in run.events)

    assert values == expected, "the same weights, bit for bit"
    check_steps(run, calm)
    check_checkpoints(run, calm)


def check_steps(run, calm):
    """Every step of every rank is there, with the loss that it should have: what was not reported before a checkpoint
    was committed, was made again."""
    losses = calm.metrics.set_index(["step", "rank"])["loss"]
    seen = run.metrics.set_index(["step", "rank"])["loss"]
    assert sorted(seen.index) == [(step, rank) for step in range(1, NUM_STEPS + 1) for rank in (0, 1)]
    assert seen.sort_index().tolist() == losses.sort_index().tolist()


def check_checkpoints(run, calm):
    """Every one that was ever announced is there, whole, and what an undisturbed run would have saved at that step."""
    announced = [event["path"] for event in run.events if event["kind"] == "checkpoint"]
    right = {checkpoint["step"]: checkpoint for checkpoint in map(load, (info.path for info in calm.checkpoints))}
    assert len(announced) >= NUM_STEPS // SAVE_EVERY - 6
    for path in announced:
        checkpoint = load(path)
        expected = right[checkpoint["step"]]["model"]
        assert all(torch.equal(tensor, expected[name]) for name, tensor in checkpoint["model"].items())
