"""A checkpoint is a cut through all ranks: with real workers, on both engines."""

import os
import random
import signal

import pytest
from cut_ranks import (
    NUM_STEPS,
    train_and_die_before_saving,
    train_apart,
    train_unequally,
    train_where_rank_0_saves,
    train_with_own_numbers,
)

import paceline
from paceline import CheckpointStrategy, SGDCallback
from paceline.errors import SaveMismatchError


def steps_of(run):
    return run.metrics[["step", "rank"]].values.tolist()


EVERY_STEP = [[step, rank] for step in range(1, NUM_STEPS + 1) for rank in (0, 1)]


@pytest.mark.parametrize(("kill_at", "own"), [(1, True), (2, False), (11, True), (NUM_STEPS, False)])
def test_slow_rank_is_killed_and_no_step_of_any_rank_is_missing(warm, tmp_path, kill_at, own):
    config = {"dir": str(tmp_path), "kill_at": kill_at, "own": own, "save_every": 3}
    began_at = warm.run(train_apart, config, checkpoint_strategy=CheckpointStrategy(num_to_keep=2))
    assert began_at == [(kill_at - 1) // 3 * 3] * 2, "where the slow rank had saved last"
    run = paceline.load_run(warm.latest_run_dir)
    assert steps_of(run) == EVERY_STEP
    assert [info.id for info in run.checkpoints][-1] == NUM_STEPS // 3
    assert not list(run.path.glob("checkpoints/.check*")), "no draft is left behind"


@pytest.mark.parametrize("num_to_keep", [1, 0])
@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_goes_on_with_its_own_state_and_random_numbers(warm, rank, num_to_keep, tmp_path):
    strategy = CheckpointStrategy(num_to_keep=num_to_keep)
    undisturbed = []
    for one in range(2):
        generator, total = random.Random(one), 0.0
        for _ in range(NUM_STEPS):
            total += generator.random()
        undisturbed.append(total)
    config = {"kill": [rank, 10], "killed": str(tmp_path / "killed")}
    assert warm.run(train_with_own_numbers, config, checkpoint_strategy=strategy) == undisturbed
    run = paceline.load_run(warm.latest_run_dir)
    assert steps_of(run) == EVERY_STEP
    assert warm.latest_checkpoint.all_ranks == [{"total": total} for total in undisturbed]
    assert sum(event["kind"] == "restart" for event in run.events) == 1


class TouchAt(SGDCallback):
    """When the driver has committed so many checkpoints."""

    def __init__(self, path, id):
        self.path, self.id = path, id

    def handle_checkpoint(self, checkpoint, **info):
        if checkpoint.id == self.id:
            self.path.touch()


def test_only_rank_0_saves_and_it_means_what_it_says(warm, tmp_path):
    go = tmp_path / "go"
    began_at = warm.run(train_where_rank_0_saves, {"go": str(go)}, callbacks=[TouchAt(go, 5)])
    assert min(began_at) >= 5


def test_ranks_save_unequally_often(warm):
    with pytest.raises(SaveMismatchError, match=r"rank 1 ended after 2 .*rank 0 has made 3"):
        warm.run(train_unequally, {})
    assert paceline.load_run(warm.latest_run_dir).status.state == "FAILED"


@pytest.mark.parametrize(("own", "begins_at"), [(False, 5), (True, 4)])
def test_survivors_commit_what_is_complete_without_the_rank_that_was_lost(warm, tmp_path, own, begins_at):
    config = {"go": str(tmp_path / "go"), "own": own}
    assert warm.run(train_and_die_before_saving, config) == [begins_at] * 2
    assert steps_of(paceline.load_run(warm.latest_run_dir)) == EVERY_STEP


def test_rank_0_alone_reports_and_saves_and_a_worker_dies(warm):
    """The usual idiom. All ranks meet in each step, which shows that the others do not save."""

    def train():
        import torch

        first = (paceline.load_checkpoint() or {"step": 0})["step"]
        for step in range(first + 1, 9):
            torch.distributed.all_reduce(torch.ones(1))
            torch.distributed.barrier()
            if step == 7 and not first and paceline.world_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if paceline.world_rank() == 0:
                paceline.report(step=step)
                paceline.save_checkpoint(step=step)
                paceline.load_checkpoint()  # what was saved is durable
        return first

    assert min(warm.run(train)) >= 5
