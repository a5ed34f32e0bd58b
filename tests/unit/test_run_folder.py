import logging
import os
import resource
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paceline.errors import ArgumentError, RunNotResumableError, TrainerStateError
from paceline.runs import RunFolder
from paceline.runs.driver_lock import DriverLock
from paceline.runs.durable import read_json, read_json_lines


@contextmanager
def files_limited_to(num_bytes: int) -> Iterator[None]:
    """The kernel lets no file of this process grow past the limit: a full disk, partial writes included."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    with RunFolder.create(tmp_path / "exp") as folder:
        yield folder


def status_of(folder: RunFolder) -> dict[str, object]:
    return read_json(folder.path / "status.json") or {}


def test_a_new_run_is_a_pending_folder(tmp_path: Path, folder: RunFolder) -> None:
    assert folder.path == tmp_path / "exp" / "run_001"
    assert folder.name == "exp/run_001"
    assert folder.checkpoints_dir == folder.path / "checkpoints"
    assert folder.log_path(1) == folder.path / "logs" / "rank_1.log"
    assert folder.checkpoints_dir.is_dir()
    assert folder.logs_dir.is_dir()
    assert status_of(folder)["state"] == "PENDING"
    assert status_of(folder)["pid"] == os.getpid()


def test_the_request_is_written_once(folder: RunFolder) -> None:
    folder.write_request({"config": {"lr": 0.1}})
    with pytest.raises(TrainerStateError, match="once"):
        folder.write_request({"config": {"lr": 0.2}})
    assert read_json(folder.path / "run.json") == {"config": {"lr": 0.1}}


def test_states_keep_their_fields_and_times(tmp_path: Path) -> None:
    now = iter(range(100, 200))
    with RunFolder.create(tmp_path, clock=lambda: float(next(now))) as folder:
        folder.set_state("RUNNING", worker_pids=[1, 2])
        started = status_of(folder)["started"]
        folder.set_state("RUNNING", worker_pids=[3, 4])  # the workers were renewed
        folder.set_state("FAILED", "rank 1 raised ValueError")
        status = status_of(folder)
    assert status["started"] == started
    assert status["worker_pids"] == [3, 4]
    assert status["reason"] == "rank 1 raised ValueError"
    assert isinstance(started, float)
    assert isinstance(status["ended"], float)
    assert status["ended"] > started


def test_a_state_that_does_not_exist_is_refused(folder: RunFolder) -> None:
    with pytest.raises(ValueError, match="HAPPY"):
        folder.set_state("HAPPY")


def test_the_first_final_state_stands(folder: RunFolder) -> None:
    folder.set_state("RUNNING")
    folder.set_state("SUCCEEDED")
    before = status_of(folder)
    folder.set_state("STOPPED", "Ctrl-C while closing")
    folder.set_state("RUNNING")
    assert folder.beat() is False
    assert status_of(folder) == before
    assert before["state"] == "SUCCEEDED"


def test_steps_and_events_are_lines(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, clock=lambda: 5.0) as folder:
        folder.record_step(1, 1, [{"loss": 1.0}, {"loss": float("nan")}])
        folder.record_step(2, 2, [{"loss": 0.5}, None])
        folder.record_event("seed", seed=3, rank=0)
        folder.record_event("note", time=4.0)
    assert read_json_lines(folder.path / "metrics.jsonl") == [
        {"step": 1, "attempt": 1, "time": 5.0, "ranks": [{"loss": 1.0}, {"loss": None}]},
        {"step": 2, "attempt": 2, "time": 5.0, "ranks": [{"loss": 0.5}, None]},
    ]
    assert read_json_lines(folder.path / "events.jsonl") == [
        {"kind": "seed", "time": 5.0, "seed": 3, "rank": 0},
        {"kind": "note", "time": 4.0},
    ]


def test_who_sees_a_final_state_sees_all_steps(folder: RunFolder) -> None:
    folder.record_step(1, 1, [{}])
    assert read_json_lines(folder.path / "metrics.jsonl") == []
    folder.set_state("SUCCEEDED")
    assert len(read_json_lines(folder.path / "metrics.jsonl")) == 1


def test_many_steps_do_not_wait_for_a_flush(folder: RunFolder) -> None:
    for step in range(1000):
        folder.record_step(step, 1, [{}])
    assert len(read_json_lines(folder.path / "metrics.jsonl")) > 500


def heartbeat_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "paceline-heartbeat"]


def test_the_heart_beats_until_the_end(tmp_path: Path) -> None:
    ticks = 0
    has_beaten = threading.Event()

    def clock() -> float:
        nonlocal ticks
        ticks += 1
        if ticks > 50:
            has_beaten.set()
        return float(ticks)

    with RunFolder.create(tmp_path, clock=clock) as folder:
        folder.set_state("RUNNING")
        folder.record_step(1, 1, [{}])
        folder.start_heartbeat(interval_s=0.001)
        folder.start_heartbeat(interval_s=0.001)
        assert len(heartbeat_threads()) == 1
        assert has_beaten.wait(30)
        assert len(read_json_lines(folder.path / "metrics.jsonl")) == 1  # a beat flushes
        folder.set_state("SUCCEEDED")
        assert heartbeat_threads() == []
        folder.start_heartbeat(interval_s=0.001)
        assert heartbeat_threads() == []
    status = status_of(folder)
    assert status["state"] == "SUCCEEDED"
    assert isinstance(status["heartbeat"], float)
    assert status["heartbeat"] > 40


def test_close_ends_the_heartbeat(folder: RunFolder) -> None:
    folder.start_heartbeat(interval_s=60)
    folder.close()
    folder.close()
    assert heartbeat_threads() == []
    assert status_of(folder)["state"] == "PENDING"


def test_a_heartbeat_never_overwrites_a_final_state(tmp_path: Path) -> None:
    for _ in range(20):
        with RunFolder.create(tmp_path) as folder:
            folder.set_state("RUNNING")
            in_beat = threading.Event()

            def beat(folder: RunFolder = folder, in_beat: threading.Event = in_beat) -> None:
                while folder.beat():
                    in_beat.set()

            thread = threading.Thread(target=beat)
            thread.start()
            assert in_beat.wait(30)
            folder.set_state("FAILED")
            thread.join(30)
            assert status_of(folder)["state"] == "FAILED"


def test_disk_full_does_not_stop_the_run(folder: RunFolder, caplog: pytest.LogCaptureFixture) -> None:
    folder.set_state("RUNNING")
    folder.record_step(1, 1, [{}])
    folder.flush()
    with files_limited_to(0), caplog.at_level(logging.WARNING):
        for step in (2, 3, 4):
            folder.record_step(step, 1, [{}])
            folder.flush()
        folder.record_event("retry")
        folder.flush()
        assert folder.beat() is True
        folder.set_state("RUNNING", worker_pids=[7])
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "metrics.jsonl could not be written" in caplog.text
    folder.record_step(5, 1, [{}])
    assert folder.beat() is True
    assert [line["step"] for line in read_json_lines(folder.path / "metrics.jsonl")] == [1, 5]
    (event,) = read_json_lines(folder.path / "events.jsonl")
    assert (event["kind"], event["num_steps"], event["num_events"]) == ("lines_lost", 3, 1)
    assert status_of(folder)["worker_pids"] == [7]
    folder.close()
    assert len(read_json_lines(folder.path / "events.jsonl")) == 1  # told once
    assert len(caplog.records) == 1


def test_disk_full_to_the_end_is_still_told_when_the_run_closes(folder: RunFolder) -> None:
    folder.record_step(1, 1, [{}])
    with files_limited_to(0):
        folder.flush()
    folder.close()
    assert [event["kind"] for event in read_json_lines(folder.path / "events.jsonl")] == ["lines_lost"]


def test_no_room_for_a_second_file_does_not_hide_how_the_run_ended(folder: RunFolder) -> None:
    folder.set_state("RUNNING", note="x" * 1000)
    (folder.path / f".status.json.{os.getpid()}-{threading.get_ident()}.tmp").mkdir()
    folder.set_state("SUCCEEDED", note="")
    assert status_of(folder)["state"] == "SUCCEEDED"


def test_a_deleted_folder_does_not_stop_the_run(folder: RunFolder, caplog: pytest.LogCaptureFixture) -> None:
    shutil.rmtree(folder.path)
    folder.set_state("RUNNING")
    folder.record_step(1, 1, [{}])
    folder.flush()
    folder.record_event("retry")
    folder.set_state("SUCCEEDED")
    folder.close()
    folder.close()
    refusal, lost = (record.getMessage() for record in caplog.records)
    assert "could not be written" in refusal
    assert lost == f"1 steps and 1 events of {folder.path} are in no file."


def test_disk_is_full_when_the_run_begins(tmp_path: Path) -> None:
    with files_limited_to(0), pytest.raises(ArgumentError, match=r"exp/run_001: .*Make room there, or give"):
        RunFolder.create(tmp_path / "exp")
    assert list((tmp_path / "exp").iterdir()) == []  # nor is it taken for a run that was lost


def test_run_that_could_not_begin_has_failed(tmp_path: Path) -> None:
    (tmp_path / "exp").mkdir()
    with RunFolder.create(tmp_path / "exp") as first:
        pass
    refused = tmp_path / "exp" / "run_002" / f".status.json.{os.getpid()}-{threading.get_ident()}.tmp"
    times = iter([lambda: refused.mkdir(), lambda: None, lambda: None, refused.rmdir])

    def clock() -> float:
        next(times, lambda: None)()
        return 0.0

    with pytest.raises(ArgumentError, match="run_002"):
        RunFolder.create(tmp_path / "exp", clock=clock)
    status = read_json(refused.parent / "status.json") or {}
    assert status["state"] == "FAILED"
    assert "run_002" in str(status["reason"])
    assert first.path.is_dir()


def test_run_that_cannot_go_on_is_free_for_another_try(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "exp") as folder:
        folder.set_state("FAILED")
    folder.logs_dir.rmdir()
    folder.logs_dir.touch()
    with pytest.raises(RunNotResumableError, match=r"cannot be written: .*logs"):
        RunFolder.reopen(folder.path)
    assert status_of(folder)["state"] == "FAILED"
    folder.logs_dir.unlink()
    RunFolder.reopen(folder.path).close()


def test_child_that_lives_on_does_not_keep_a_run_from_being_resumed(folder: RunFolder) -> None:
    inherited = os.dup(folder._lock._fd)  # as in a fork: the same lock
    try:
        folder.close()
        with RunFolder.reopen(folder.path) as again:
            assert again.path == folder.path
    finally:
        os.close(inherited)


def test_child_that_forgets_a_run_leaves_it_to_its_parent(tmp_path: Path) -> None:
    lock = DriverLock(tmp_path)
    parents = os.dup(lock._fd)
    lock._owner_pid = 0  # as in a fork
    lock.release()
    with pytest.raises(TrainerStateError, match="is being written by another process"):
        DriverLock(tmp_path)
    os.close(parents)
