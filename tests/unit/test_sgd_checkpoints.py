"""Checkpoints of a DistributedSGD, in this process: which are kept, and storage that refuses."""

import errno
import shutil

import numpy as np
import pytest

import paceline
from paceline.checkpoints import CheckpointStore
from paceline.errors import ArgumentError, CheckpointWriteError, TrainerStateError
from paceline.sgd import DistributedSGD, NumpyModel


class Falling(NumpyModel):
    """Has these losses, one after the other."""

    def __init__(self, *losses):
        self.weights, self.losses = {"w": np.zeros(1)}, iter(losses)

    def loss_and_grad(self):
        return next(self.losses), {"w": np.ones(1)}


def here(*losses, **more):
    return DistributedSGD(lambda: Falling(*losses), num_workers=0, use_cpus=True, verbose=False, **more)


def test_those_with_the_best_loss_are_kept():
    best = paceline.CheckpointStrategy(1, checkpoint_score_attribute="loss", checkpoint_score_order="min")
    with here(3.0, 1.0, 2.0, checkpoint_strategy=best) as sgd:
        for _ in range(3):
            sgd.step()
            sgd.save_checkpoint()
    found = paceline.load_run(sgd.run_dir).checkpoints
    assert [(info.iteration, info.score) for info in found] == [(2, 1.0), (3, 2.0)]  # the best, and the latest


def test_a_score_that_no_step_has_told():
    with here(1.0, checkpoint_strategy=paceline.CheckpointStrategy(1, "accuracy")) as sgd:
        sgd.step()
        with pytest.raises(ArgumentError, match=r"ranks by 'accuracy'.*it got: 'loss'"):
            sgd.save_checkpoint()


def test_a_strategy_that_keeps_none():
    with pytest.raises(ArgumentError, match="num_to_keep=0"):
        here(checkpoint_strategy=paceline.CheckpointStrategy(0))


def test_disk_full_while_a_checkpoint_is_committed(monkeypatch):
    """Nothing else passes for it: not the one before, if there is one. Training can go on."""

    def refuse(self, parts, world_size):
        raise OSError(errno.ENOSPC, "No space left on device")

    with here(2.0, 1.0) as sgd:
        sgd.step()
        with monkeypatch.context() as full:
            full.setattr(CheckpointStore, "commit", refuse)
            with pytest.raises(CheckpointWriteError, match="No space left on device"):
                sgd.save_checkpoint()
        first = sgd.save_checkpoint()
        sgd.step()
        with monkeypatch.context() as full:
            full.setattr(CheckpointStore, "commit", refuse)
            with pytest.raises(CheckpointWriteError, match="No space left on device"):
                sgd.save_checkpoint()
        assert sgd.save_checkpoint() != first
    assert len(paceline.load_run(sgd.run_dir).checkpoints) == 2


def test_disk_full_while_a_checkpoint_is_written(monkeypatch):
    """What is there of it by then would fill the disk."""
    put = CheckpointStore.put

    def refuse(self, id, files):
        put(self, id, files)
        raise OSError(errno.ENOSPC, "No space left on device")

    with here(2.0) as sgd:
        sgd.step()
        with monkeypatch.context() as full:
            full.setattr(CheckpointStore, "put", refuse)
            with pytest.raises(CheckpointWriteError, match="No space left on device"):
                sgd.save_checkpoint()
        assert not list((sgd.run_dir / "checkpoints").glob("*checkpoint_*"))
        sgd.save_checkpoint()
    assert [event["id"] for event in paceline.load_run(sgd.run_dir).events if event["kind"] == "save_failed"] == [1]


def test_storage_refuses_what_is_written():
    with here(2.0) as sgd:
        sgd.step()
        folder = sgd.run_dir / "checkpoints"
        shutil.rmtree(folder)
        folder.write_text("in the way")
        with pytest.raises(CheckpointWriteError, match="The checkpoint of step 1 could not be written"):
            sgd.save_checkpoint()
        other = sgd.run_dir / "run.json"
        with pytest.raises(CheckpointWriteError, match=f"No checkpoint could be written to {other}"):
            sgd.save_checkpoint(other)


def test_callback_that_raises_ends_the_run():
    """As in a step, and as with a Trainer."""

    class Refusing(paceline.Callback):
        def handle_checkpoint(self, checkpoint, **info):
            raise KeyError("refused")

    sgd = here(2.0, 1.0, callbacks=[Refusing()])
    sgd.step()
    with pytest.raises(KeyError, match="refused"):
        sgd.save_checkpoint()
    assert paceline.load_run(sgd.run_dir).status.state == "FAILED"
    with pytest.raises(TrainerStateError, match="has ended"):
        sgd.step()


def test_disk_full_while_stacks_of_a_hang_are_kept():
    """The hang itself is what the user is told of."""
    with here(1.0) as sgd:
        sgd.step()
        shutil.rmtree(sgd.run_dir / "logs", ignore_errors=True)
        (sgd.run_dir / "logs").write_text("no folder")  # as good as full: nothing can be written there
        told = sgd._team._keep_stacks()
    assert "Stacks of all ranks could not be written" in told


def test_folder_of_the_run_may_be_named():
    """As one restores from it. A checkpoint that the run knew nothing of would have the number of its next one."""
    with here(2.0, 1.0, checkpoint_strategy=paceline.CheckpointStrategy(1)) as sgd:
        for save in (lambda: sgd.save_checkpoint(sgd.run_dir / "checkpoints"), sgd.save_checkpoint):
            sgd.step()
            path = save()
        sgd.restore_checkpoint(sgd.run_dir / "checkpoints")
        assert sgd.num_steps == 2
    run = paceline.load_run(sgd.run_dir)
    assert ([info.path for info in run.checkpoints], run.status.state) == ([path], "SUCCEEDED")
