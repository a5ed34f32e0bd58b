"""A long run in which workers are killed and paused and the disk refuses writes: in the end, as if nothing had been.

What happens, and when, is drawn from a seed; each blow waits for some progress after the last, so it ends.
"""

import contextlib
import os
import random
import resource
import signal
import threading

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline import RayEngine, SGDCallback, Trainer
from paceline.checkpoints import load
from paceline.errors import CheckpointWriteError

NUM_STEPS = 2000
SAVE_EVERY = 25


def train(config):
    """Fits a plane with momentum. Data depend on step and rank alone, so that any attempt computes the same."""
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    checkpoint = paceline.load_checkpoint() or {"step": 0}
    if checkpoint["step"]:
        model.module.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    disk = Disk(config["refusals"])
    for step in range(checkpoint["step"] + 1, NUM_STEPS + 1):
        x = torch.rand(8, 3, generator=torch.Generator().manual_seed(2 * step + paceline.world_rank()))
        loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        paceline.report(step=step, loss=loss.item())
        disk.set_mood(step)
        if step % SAVE_EVERY == 0:
            try:
                paceline.save_checkpoint(step=step, model=model.module.state_dict(), optimizer=optimizer.state_dict())
            except CheckpointWriteError:  # of the one before: the disk refused too often, and the next may do
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
        self.num_blows, self.next_step, self.reached = num_blows, 100, 0
        self.paused = []

    def handle_result(self, results, **info):
        self.reached = max(self.reached, results[0]["step"])
        if self.reached >= self.next_step and len(self.blows) < self.num_blows:
            self.next_step = self.reached + self.random.randint(100, 250)
            self.strike(self.random.choice(["kill", "kill", "pause", "hang"]), self.random.choice([0, 1]))

    def strike(self, blow, rank):
        self.blows.append(blow)
        pid = self.trainer._crew.group.infos[rank].pid
        os.kill(pid, signal.SIGKILL if blow == "kill" else signal.SIGSTOP)
        if blow == "pause":
            timer = threading.Timer(self.random.uniform(0.05, 0.4), go_on, [pid])
            timer.start()
            self.paused.append(timer)

    def finish_training(self, error=False, **info):
        for timer in self.paused:
            timer.join()


def go_on(pid):
    """If it is still there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


@pytest.fixture(scope="module")
def undisturbed():
    """What the function returns, and its run. It is the same on every engine."""
    with Trainer(num_workers=2, engine="local") as trainer:
        return trainer.run(train, {"refusals": []}), paceline.load_run(trainer.latest_run_dir)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("engine", "num_blows"), [("local", 8), ("ray", 4)])
def test_disturbed_run_equals_an_undisturbed_one(engine, num_blows, undisturbed):
    most_missing = 1 if engine == "local" else SAVE_EVERY  # reports that gather on Ray for 50 ms are lost together
    engine = RayEngine(spare_workers=1) if engine == "ray" else engine
    seed = 20
    refusals = [(step, 3) for step in random.Random(seed).sample(range(SAVE_EVERY, NUM_STEPS, SAVE_EVERY), 12)]
    expected, calm = undisturbed
    with Trainer(num_workers=2, engine=engine, max_retries=-1, hang_timeout_s=4) as trainer:
        chaos = Chaos(trainer, seed, num_blows)
        values = trainer.run(train, {"refusals": refusals}, callbacks=[chaos])
    run = paceline.load_run(trainer.latest_run_dir)
    assert len(chaos.blows) == num_blows, "it was disturbed"
    assert set(chaos.blows) >= {"kill", "pause"}
    assert any(event["kind"] == "restart" for event in run.events)

    assert values == expected, "the same weights, bit for bit"
    check_steps(run, calm, most_missing)
    check_checkpoints(run, calm)


def check_steps(run, calm, most_missing):
    """Every step is there, with the losses it should have. Who was killed may have failed to report its last ones, of
    which those are missing that were not made again: they end at the checkpoint from which the next attempt went on."""
    assert run.metrics[run.metrics["rank"] == 0]["step"].nunique() <= NUM_STEPS
    assert sorted(run.metrics["step"].unique()) == list(range(1, NUM_STEPS + 1))
    losses = calm.metrics.set_index(["step", "rank"])["loss"]
    seen = run.metrics.set_index(["step", "rank"])["loss"]
    assert seen.tolist() == losses.loc[seen.index].tolist()
    gaps = [(rank, gap) for rank in (0, 1) for gap in gaps_in(seen.xs(rank, level="rank").index)]
    assert all(len(gap) <= most_missing for _, gap in gaps), gaps
    assert {(rank, gap[-1]) for rank, gap in gaps} <= set(ends(run)), "only who died, and up to where the rest went on"


def ends(run):
    """For each rank that died: the rank, and the step from which the next attempt went on."""
    died = []
    for event in run.events:
        if event["kind"] == "worker_died":
            died.append(event["rank"])
        elif event["kind"] == "attempt":
            step = load(event["resumes_from"])["step"] if event["resumes_from"] else 0
            yield from ((rank, step) for rank in died)
            died.clear()


def gaps_in(steps):
    """The steps that are missing, as runs of consecutive ones."""
    gaps = []
    for step in sorted(set(range(1, NUM_STEPS + 1)) - set(steps)):
        if gaps and gaps[-1][-1] == step - 1:
            gaps[-1].append(step)
        else:
            gaps.append([step])
    return gaps


def check_checkpoints(run, calm):
    """Every one that was ever announced is there, whole, and what an undisturbed run would have saved at that step."""
    announced = [event["path"] for event in run.events if event["kind"] == "checkpoint"]
    right = {checkpoint["step"]: checkpoint for checkpoint in map(load, (info.path for info in calm.checkpoints))}
    assert len(announced) >= NUM_STEPS // SAVE_EVERY - 12
    for path in announced:
        checkpoint = load(path)
        expected = right[checkpoint["step"]]["model"]
        assert all(torch.equal(tensor, expected[name]) for name, tensor in checkpoint["model"].items())
