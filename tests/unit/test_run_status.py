import os
from dataclasses import replace

import pytest

from paceline.runs.status import Driver, RunState, RunStatus, find_driver, judge, process_started

RUNNING = RunStatus(RunState.RUNNING, heartbeat=1000.0, pid=42, host="here", started=990.0)
PENDING = replace(RUNNING, state=RunState.PENDING)


@pytest.mark.parametrize(
    ("status", "silence_s", "driver", "expected"),
    [
        (RUNNING, 5, "here", "RUNNING"),
        (RUNNING, 5, "unknown", "RUNNING"),
        (RUNNING, 5, "gone", "LOST"),
        (RUNNING, 30, "unknown", "RUNNING"),
        (RUNNING, 31, "unknown", "LOST"),
        (RUNNING, 31, "here", "LOST"),
        (RUNNING, -100, "unknown", "RUNNING"),  # the other machine's clock is ahead
        (PENDING, 31, "here", "PENDING"),
        (PENDING, 31, "unknown", "LOST"),
        (PENDING, 1, "gone", "LOST"),
        (replace(RUNNING, state=RunState.SUCCEEDED), 1e6, "gone", "SUCCEEDED"),
        (replace(RUNNING, state=RunState.STOPPED), 1e6, "gone", "STOPPED"),
        (replace(RUNNING, heartbeat=None), 0, "unknown", "LOST"),
    ],
)
def test_a_run_that_nobody_drives_is_lost(status: RunStatus, silence_s: float, driver: Driver, expected: str) -> None:
    assert judge(status, now=1000.0 + silence_s, driver=driver).state == expected


def test_a_lost_run_says_why_and_ended_with_its_last_heartbeat() -> None:
    silent = judge(RUNNING, now=1045.0, driver="here")
    assert silent.reason == "its last heartbeat was 45 s ago, though process 42 still exists"
    assert silent.ended == 1000.0
    gone = judge(RUNNING, now=1001.0, driver="gone")
    assert gone.reason is not None
    assert "process 42 ended" in gone.reason


def test_the_driver_is_looked_for_where_it_ran() -> None:
    me = replace(RUNNING, pid=os.getpid(), host=os.uname().nodename, pid_started=process_started(os.getpid()))
    assert find_driver(me) == "here"
    assert find_driver(replace(me, pid_started=1)) == "gone"  # its pid was given to another process since
    assert find_driver(replace(me, pid=2**22 + 1)) == "gone"
    assert find_driver(replace(me, pid=2**22 + 1, host="another")) == "unknown"
    assert find_driver(replace(me, pid=2**22 + 1, machine="another boot or container")) == "unknown"
    assert find_driver(replace(me, pid=None)) == "unknown"


@pytest.mark.parametrize("fields", [{}, {"state": "HAPPY"}, {"state": None}, {"state": "RUNNING", "worker_pids": 3}])
def test_fields_that_are_no_status_give_none(fields: dict[str, object]) -> None:
    assert RunStatus.from_fields(fields) is None


def test_fields_that_are_not_known_are_ignored() -> None:
    status = RunStatus.from_fields({"state": "RUNNING", "worker_pids": [1, 2], "colour": "blue"})
    assert status == RunStatus(RunState.RUNNING, worker_pids=(1, 2))
