"""A run goes on after its driver is gone: in a new process, from the last committed checkpoint, in the same folder."""

import json
import os
import signal
import subprocess
import sys

import pytest

import paceline
from paceline import BackendConfig, CheckpointStrategy, Trainer
from paceline.errors import RunNotResumableError, TrainerStateError

PROGRAM = """
import sys
import time
import paceline
from paceline import BackendConfig, Trainer
from numbers_to_add import weight_of

def train(config):
    checkpoint = paceline.load_checkpoint() or {{"step": 0, "total": 0}}
    total = checkpoint["total"]
    for step in range(checkpoint["step"] + 1, 9):
        total += weight_of(step) * config["factor"]
        paceline.report(step=step, total=total)
        paceline.save_checkpoint(step=step, total=total)
        if step == 4 and checkpoint["step"] == 0:
            paceline.load_checkpoint()  # it is committed
            print("committed", flush=True)
            while not paceline.should_stop():
                time.sleep(0.01)
            return None
    return checkpoint["step"], total

if __name__ == "__main__":
    trainer = Trainer(backend=BackendConfig(), num_workers=2, engine={engine!r}, logdir=sys.argv[1])
    trainer.run(train, {{"factor": 10}})
"""
RESUME = "import sys, json; from paceline import Trainer; print(json.dumps(Trainer.resume(sys.argv[1])))"


@pytest.fixture(params=["local", "ray"])
def lost_run(request, tmp_path):
    """Starts the program and waits for its fourth checkpoint; gives the process and its run folder."""
    environ = dict(os.environ)
    if request.param == "ray":
        environ["RAY_ADDRESS"] = request.getfixturevalue("ray_cluster").get_runtime_context().gcs_address
    (tmp_path / "numbers_to_add.py").write_text("def weight_of(step): return step\n")
    (tmp_path / "program.py").write_text(PROGRAM.format(engine=request.param))
    child = subprocess.Popen(
        [sys.executable, tmp_path / "program.py", tmp_path / "runs"], stdout=subprocess.PIPE, text=True, env=environ
    )
    while "committed" not in (line := child.stdout.readline()):
        assert line, "the program ended"
    yield child, tmp_path / "runs" / "run_001", environ
    child.kill()
    child.communicate()


def test_running_run_is_left_alone_and_when_its_driver_dies_another_process_goes_on(lost_run, wait_for_end):
    child, run_dir, environ = lost_run
    with pytest.raises(TrainerStateError, match=f"driven by process {child.pid}"):
        Trainer.resume(run_dir)
    os.kill(child.pid, signal.SIGKILL)
    child.wait(timeout=60)
    wait_for_end(paceline.load_run(run_dir).status.worker_pids)
    assert paceline.load_run(run_dir).status.state == "LOST"
    before = paceline.load_run(run_dir).status
    done = subprocess.run(
        [sys.executable, "-c", RESUME, run_dir], capture_output=True, text=True, env=environ, timeout=120, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [[4, 360]] * 2
    run = paceline.load_run(run_dir)
    assert run.status.state == "SUCCEEDED"
    assert run.status.created == before.created
    assert run.status.pid != before.pid
    assert run.metrics[run.metrics["rank"] == 0]["total"].tolist() == [10, 30, 60, 100, 150, 210, 280, 360]
    assert [event["number"] for event in run.events if event["kind"] == "attempt"] == [0, 1]
    assert run.config == {"factor": 10}
    with pytest.raises(RunNotResumableError, match="has succeeded"):
        Trainer.resume(run_dir)


def test_driver_is_terminated_saves_and_can_be_resumed(lost_run, wait_for_end):
    child, run_dir, _ = lost_run
    os.kill(child.pid, signal.SIGTERM)
    child.wait(timeout=60)
    wait_for_end(paceline.load_run(run_dir).status.worker_pids)
    assert child.returncode == 128 + signal.SIGTERM
    status = paceline.load_run(run_dir).status
    assert (status.state, status.reason) == ("STOPPED", "the driver got SIGTERM")
    assert Trainer.resume(run_dir) == [(4, 360)] * 2


def fail_at(config):
    checkpoint = paceline.load_checkpoint() or {"step": 0}
    for step in range(checkpoint["step"] + 1, 6):
        if step == config["bad_step"]:
            raise ValueError("a mistake")
        paceline.report(step=step)
        paceline.save_checkpoint(step=step)
    return checkpoint["step"]


@pytest.fixture
def failed_run():
    trainer = Trainer(backend=BackendConfig(), num_workers=1)
    with trainer, pytest.raises(ValueError, match="a mistake"):
        trainer.run(fail_at, {"bad_step": 3})
    return trainer.latest_run_dir


def test_failed_run_goes_on_with_a_mended_function(failed_run):
    with pytest.raises(ValueError, match="a mistake"):
        Trainer.resume(failed_run)
    assert Trainer.resume(failed_run.parent, lambda config: fail_at({"bad_step": None})) == [2]
    run = paceline.load_run(failed_run)
    assert run.metrics["step"].tolist() == [1, 2, 3, 4, 5]
    assert run.status.state == "SUCCEEDED"


def test_call_that_was_changed_or_comes_from_elsewhere_is_not_opened(failed_run):
    path = failed_run / "call.pkl"
    content = path.read_bytes()
    path.write_bytes(content[:40] + bytes([content[40] ^ 1]) + content[41:])
    with pytest.raises(RunNotResumableError, match="trusted=True"):
        Trainer.resume(failed_run)
    path.write_bytes(bytes(32) + content[32:])
    with pytest.raises(RunNotResumableError, match="not written by this user"):
        Trainer.resume(failed_run)
    with pytest.raises(ValueError, match="a mistake"):
        Trainer.resume(failed_run, trusted=True)
    path.unlink()
    with pytest.raises(RunNotResumableError, match="does not hold the call"):
        Trainer.resume(failed_run)


def test_two_processes_do_not_drive_one_run(failed_run):
    from paceline.runs import RunFolder

    with RunFolder.reopen(failed_run), pytest.raises(TrainerStateError):
        Trainer.resume(failed_run)


def test_run_goes_on_from_checkpoints_behind_a_url(tmp_path):
    """That this account has put there itself."""

    def train():
        checkpoint = paceline.load_checkpoint()
        if checkpoint is None:
            paceline.save_checkpoint(step=1)
            paceline.load_checkpoint()
            raise ValueError("once")
        return checkpoint["step"], checkpoint.path

    strategy = CheckpointStrategy(storage_path="memory://resumed")
    trainer = Trainer(BackendConfig(), num_workers=0, logdir=tmp_path / "runs")
    with trainer, pytest.raises(ValueError, match="once"):
        trainer.run(train, checkpoint_strategy=strategy)
    path = "memory://resumed/runs/run_001/checkpoint_000001"
    assert paceline.load_run(trainer.latest_run_dir).latest_checkpoint_path == path
    assert Trainer.resume(trainer.latest_run_dir) == [(1, path)]
