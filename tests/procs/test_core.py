"""Ranks that nobody of ours has started: what they leave behind together, and how they end."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from core_ranks import chief_alone, files, refusals

import paceline
from paceline import core

PROGRAM = Path(__file__).with_name("core_ranks.py")


class Ended:
    def __init__(self, code, out, err):
        self.code, self.err = code, err
        self.told = [json.loads(line) for line in out.splitlines() if line.startswith("{")]


@pytest.fixture
def run_ranks(tmp_path):
    processes = []

    def run(scenario, size=2):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        env = {**os.environ, "TMPDIR": str(tmp_path)}
        for rank in range(size):
            command = [sys.executable, str(PROGRAM), scenario, str(rank), str(size), str(port), str(tmp_path / "runs")]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            processes.append(subprocess.Popen(command, text=True, cwd=tmp_path, env=env, **pipes))
        ended = []
        for process in processes:
            out, err = process.communicate(timeout=60)
            ended.append(Ended(process.returncode, out, err))
        return ended

    yield run
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.communicate()


def the_run(tmp_path):
    return paceline.load_run(tmp_path / "runs" / "run_001")


def steps_of(run):
    return [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]


def test_all_ranks_are_in_the_run_folder(run_ranks, tmp_path):
    ended = run_ranks("everything")
    assert [one.code for one in ended] == [0, 0], [one.err for one in ended]
    run = the_run(tmp_path)
    told = [one.told[-1] for one in ended]
    assert [one["run_dir"] for one in told] == [str(run.path)] * 2
    assert [(one["rank"], one["size"], one["mine"]) for one in told] == [(0, 2, 0), (1, 2, 1)]
    assert (run.status.state, run.config) == ("SUCCEEDED", {"scenario": "everything"})
    steps = steps_of(run)
    assert [[report["loss"] for report in step["ranks"]] for step in steps[:2]] == [[1, 1.1], [2, 2.1]]
    assert [report["validation/loss"] for report in steps[2]["ranks"]] == [0.5, 0.5]
    assert steps[2]["ranks"][0]["steps_completed"] == 2
    assert "loss of this step was reported before" in told[0]["twice"]
    first = paceline.read_checkpoint(run.checkpoints[0].path)
    assert (first["step"], first.all_ranks) == (2, [{"mine": 0}, {"mine": 1}])

    for rank, one in enumerate(told):
        check_files(rank, one["files"], "checkpoint_000002", "checkpoint_000003")
        check_refusals(one["refused"])
    assert [info.id for info in run.checkpoints] == [1, 2], "the third one was deleted"


def check_files(rank, told, expected_id, expected_second):
    id, found, metadata, selected, second = told
    assert id == expected_id
    assert found == {"same.txt": "same", "deep/0.txt": "0", "deep/1.txt": "1"}
    assert metadata == {"steps_completed": 2, "ranks": {"0": 0, "1": 1}}
    assert selected == ["deep/1.txt"]
    assert second == expected_second + (" deleted" if rank else "")


def check_refusals(refused):
    assert "'weights' of ranks 0, 1 differs" in refused["differs"]
    assert "metadata 'a.b' is 1 on rank 1 and 0" in refused["metadata"]
    assert "CheckpointValueError: 'a' is a _thread.lock" in refused["value"]
    assert "nowhere" in refused["missing"]
    assert "no id of a checkpoint" in refused["outside"]
    assert "on all ranks" in refused["alone"]


def train_with_core(config):
    with core.init(logdir="not used") as context:
        context.train.report_training_metrics(1, {"loss": context.distributed.rank})
        folder = Path(config["dir"])
        return str(context.run_dir), files(context, folder), refusals(context, folder)


def test_workers_of_a_trainer_use_its_run(warm, tmp_path):
    told = warm.run(train_with_core, {"dir": str(tmp_path)})
    run = paceline.load_run(warm.latest_run_dir)
    for rank, (run_dir, found, refused) in enumerate(told):
        assert run_dir == str(run.path)
        check_files(rank, found, "checkpoint_000001", "checkpoint_000002")
        check_refusals(refused)
    assert [info.id for info in run.checkpoints] == [1]
    assert run.metrics["loss"].tolist() == [0, 1]


def test_chief_of_a_trainer_s_workers_saves_alone(warm, tmp_path):
    told = warm.run(train_chief_alone, {"dir": str(tmp_path)})
    assert told == [{"found": "w", "metadata": {"steps_completed": 1}}] * 2
    assert len(paceline.load_run(warm.latest_run_dir).checkpoints) == 1


def train_chief_alone(config):
    with core.init() as context:
        return chief_alone(context, Path(config["dir"]))


def test_chief_alone_reports_and_saves(run_ranks, tmp_path):
    ended = run_ranks("chief_alone", size=3)
    assert [one.code for one in ended] == [0, 0, 0], [one.err for one in ended]
    assert [one.told[-1]["found"] for one in ended] == ["w"] * 3
    assert [one.told[-1]["metadata"] for one in ended] == [{"steps_completed": 1}] * 3
    run = the_run(tmp_path)
    assert (run.status.state, len(run.checkpoints), len(run.metrics)) == ("SUCCEEDED", 1, 1)


def test_sigterm_of_one_rank_stops_all_at_one_step(run_ranks, tmp_path):
    ended = run_ranks("stops", size=3)
    assert [one.code for one in ended] == [143] * 3, [one.err for one in ended]
    [step] = {one.told[0]["stopped_at"] for one in ended}
    run = the_run(tmp_path)
    assert run.status.state == "STOPPED"
    assert paceline.read_checkpoint(run.checkpoints[-1].path).all_ranks == [{"step": step}] * 3


def test_rank_that_raises(run_ranks, tmp_path):
    ended = run_ranks("raises", size=3)
    assert [one.code for one in ended] == [1, 1, 1]
    assert "ValueError: no such thing" in ended[1].err
    assert "in raise_" in ended[1].err, "its traceback is whole"
    for other in (ended[0], ended[2]):
        assert "WorkerError: Rank 1 has failed: ValueError: no such thing" in other.err
    status = the_run(tmp_path).status
    assert (status.state, status.reason) == ("FAILED", "WorkerError: Rank 1 has failed: ValueError: no such thing")


def test_rank_that_is_terminated_before_it_looks(run_ranks, tmp_path):
    ended = run_ranks("is_terminated")
    assert [one.code for one in ended] == [1, 143]
    assert "WorkerError: Rank 1 was ended: Terminated" in ended[0].err
    assert the_run(tmp_path).status.state == "STOPPED"


def test_ranks_that_exit_with_success(run_ranks, tmp_path):
    assert [one.code for one in run_ranks("exits")] == [0, 0]
    assert the_run(tmp_path).status.state == "SUCCEEDED"


def test_forks_of_ranks_end_with_the_block_and_disturb_nobody(run_ranks, tmp_path):
    ended = run_ranks("forks")
    assert [one.code for one in ended] == [0, 0], [one.err for one in ended]
    assert [(one.told[-1]["ended"], one.told[-1]["found"]) for one in ended] == [([7, 1, 0], "1")] * 2
    assert "forked from the one that records" in ended[0].err
    run = the_run(tmp_path)
    assert (run.status.state, run.metrics["step"].tolist()) == ("SUCCEEDED", [1, 1])


def test_rank_that_is_killed(run_ranks, tmp_path):
    ended = run_ranks("is_killed", size=3)
    assert [one.code for one in ended] == [1, -9, 1]
    for other in (ended[0], ended[2]):
        assert "WorkersLostError: Rank 1 is gone" in other.err
    run = the_run(tmp_path)
    assert run.status.state == "FAILED"
    assert run.status.reason.startswith("WorkersLostError: Rank 1 is gone")
    assert steps_of(run)[0]["ranks"][1]["step"] == 0, "what it had reported before is there"


def test_chief_that_is_killed(run_ranks, tmp_path):
    ended = run_ranks("chief_is_killed", size=3)
    assert [one.code for one in ended] == [-9, 1, 1]
    for other in ended[1:]:
        assert "WorkersLostError: Rank 0, through which all ranks are connected, is gone" in other.err
    assert the_run(tmp_path).status.state == "LOST"


def test_ranks_that_report_unequally_often(run_ranks, tmp_path):
    ended = run_ranks("reports_unequally")
    assert [one.code for one in ended] == [1, 1]
    for one in ended:
        assert "ReportMismatchError: The ranks do not report equally often" in one.err
    assert the_run(tmp_path).status.state == "FAILED"
