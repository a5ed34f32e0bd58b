"""Processes that are looked at past Ray."""

import os
import subprocess

import pytest

from paceline.workers.ray_process import ProcessWatch, own_birth


@pytest.fixture
def sleeper():
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def birth_of(process):
    """As it would tell itself."""
    machine, _, _ = own_birth()
    with open(f"/proc/{process.pid}/stat") as file:
        return machine, process.pid, file.read().rpartition(")")[2].split()[19]


@pytest.mark.parametrize("is_buried", [False, True])
def test_end_is_told_when_it_is_missed_twice(sleeper, is_buried):
    """Also if nobody has asked for its exit code: Ray does so when it knows."""
    watch = ProcessWatch(birth_of(sleeper))
    assert not watch.look()
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | (0 if is_buried else os.WNOWAIT))
    assert [watch.look() for _ in range(3)] == [False, True, True]


def test_who_was_never_seen_here_is_not_missed(sleeper):
    """On another machine, or in a container of its own, the number is somebody else's, or nobody's."""
    machine, pid, beginning = birth_of(sleeper)
    watches = [ProcessWatch(birth) for birth in (("another", pid, beginning), (machine, pid, "7"))]
    assert not any(watch.look() for watch in watches for _ in range(3))


def test_own_process_lives():
    watch = ProcessWatch(own_birth())
    assert not any(watch.look() for _ in range(3))
