"""Where a run that is resumed finds its checkpoints. How it goes on otherwise is in tests/e2e/test_resume.py."""

import os
import shutil

import pytest

import paceline
from paceline import BackendConfig, CheckpointStrategy, Trainer
from paceline.errors import CheckpointDamagedError, CheckpointNotFoundError
from paceline.runs.kept_call import is_sealed, seal_place
from paceline.workers.inline import InlineEngine


def train():
    checkpoint = paceline.load_checkpoint()
    paceline.report()
    paceline.save_checkpoint(step=1)
    if checkpoint is None:
        raise RuntimeError("not yet")
    return checkpoint["step"]


@pytest.fixture
def failed_run(tmp_path, monkeypatch):
    """Gives the folder of a run that has saved one checkpoint, with this strategy, and then failed."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def failed_run(**strategy):
        with Trainer(num_workers=0, backend=BackendConfig(), logdir=tmp_path / "exp") as trainer:
            with pytest.raises(RuntimeError, match="not yet"):
                trainer.run(train, checkpoint_strategy=CheckpointStrategy(**strategy))
            return trainer.latest_run_dir

    return failed_run


def test_relative_storage_path_in_another_directory(failed_run, tmp_path, monkeypatch):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    run_dir = failed_run(storage_path="ck")
    monkeypatch.chdir(tmp_path / "there")
    assert Trainer.resume(run_dir) == [1]
    assert not (tmp_path / "there" / "ck").exists()


@pytest.mark.parametrize("storage_path", [None, "{tmp}/storage", "memory://{tmp}"])
def test_logdir_was_renamed(failed_run, tmp_path, storage_path):
    run_dir = failed_run(storage_path=storage_path and storage_path.format(tmp=tmp_path))
    (tmp_path / "exp").rename(tmp_path / "kept")
    assert Trainer.resume(tmp_path / "kept" / run_dir.name) == [1]


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_checkpoints_are_gone(failed_run, tmp_path, is_elsewhere):
    run_dir = failed_run(storage_path=str(tmp_path / "storage") if is_elsewhere else None)
    root = tmp_path / "storage" / "exp" / "run_001" if is_elsewhere else run_dir / "checkpoints"
    shutil.move(root, tmp_path / "moved")
    status = (run_dir / "status.json").read_bytes()
    with pytest.raises(CheckpointNotFoundError, match=f"there is none in {root}: .*Put them there"):
        Trainer.resume(run_dir)
    assert (run_dir / "status.json").read_bytes() == status, "nothing has happened"
    shutil.rmtree(root, ignore_errors=True)
    shutil.move(tmp_path / "moved", root)
    assert Trainer.resume(run_dir) == [1]


def test_cluster_is_not_there(failed_run, monkeypatch):
    def refuse(engine):
        raise ConnectionError("nobody answers")

    run_dir = failed_run()
    status = (run_dir / "status.json").read_bytes()
    monkeypatch.setattr(InlineEngine, "connect", refuse)
    with pytest.raises(ConnectionError, match="nobody answers"):
        Trainer.resume(run_dir)
    assert (run_dir / "status.json").read_bytes() == status, "nothing has happened"


def test_checkpoints_were_in_memory(failed_run):
    run_dir = failed_run(num_to_keep=0)
    with pytest.raises(RuntimeError, match="not yet"):
        Trainer.resume(run_dir)


def train_on():
    checkpoint = paceline.load_checkpoint()
    first = 1 if checkpoint is None else checkpoint["step"] + 1
    for step in range(first, 4):
        paceline.report(step=step)
        paceline.save_checkpoint(step=step)
    if checkpoint is None:
        raise RuntimeError("not yet")
    return first


@pytest.mark.parametrize("damage", ["changed", "cut", "missing"])
def test_newest_checkpoint_is_damaged(tmp_path, caplog, damage):
    run_dir = _failed(tmp_path)
    state = run_dir / "checkpoints/checkpoint_000003/state.json"
    if damage == "missing":
        state.unlink()
    else:
        state.write_bytes(state.read_bytes().replace(b"3", b"7") if damage == "changed" else state.read_bytes()[:-1])
    assert Trainer.resume(run_dir) == [3]
    assert "checkpoint_000003 is damaged: state.json" in caplog.text
    run = paceline.load_run(run_dir)
    assert [step["step"] for step in run.metrics.to_dict("records")] == [1, 2, 3]
    assert paceline.read_checkpoint(run_dir / "checkpoints/checkpoint_000004")["step"] == 3


def test_all_checkpoints_are_damaged(tmp_path):
    run_dir = _failed(tmp_path)
    for state in run_dir.glob("checkpoints/*/state.json"):
        state.write_text("{}")
    with pytest.raises(CheckpointDamagedError, match="checkpoint_000003 is damaged"):
        Trainer.resume(run_dir)
    assert len(list(run_dir.glob("checkpoints/*"))) == 3, "it has not begun anew"


def _failed(tmp_path):
    with Trainer(num_workers=0, backend=BackendConfig(), logdir=tmp_path / "exp") as trainer:
        with pytest.raises(RuntimeError, match="not yet"):
            trainer.run(train_on)
        return trainer.latest_run_dir


def test_user_without_a_home_can_begin_runs(tmp_path, monkeypatch):
    """As a container's that runs as a number. There is no place for the key: nothing is put beside the program."""

    def nobody(uid):
        raise KeyError(uid)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setattr("pwd.getpwuid", nobody)
    monkeypatch.chdir(tmp_path)
    assert is_sealed("/x", seal_place("/x"))
    assert os.listdir(tmp_path) == []
