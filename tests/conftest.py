"""Fixtures for every test, and a guard: a test that leaves a process, a thread, a variable or a file behind fails."""

import os
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest

from paceline.workers import nursery


@pytest.fixture(autouse=True)
def results_dir(tmp_path_factory, monkeypatch):
    """Runs go to a folder of the test's own."""
    path = tmp_path_factory.mktemp("results")
    monkeypatch.setenv("PACELINE_RESULTS", str(path))
    monkeypatch.setenv("PACELINE_PROGRESS", "0")
    return path


@pytest.fixture(autouse=True)
def no_leaks(results_dir):
    before = _world()
    yield
    deadline = time.monotonic() + 5
    while (left := _leaks(before, _world())) and time.monotonic() < deadline:
        time.sleep(0.05)  # processes and threads that are on their way out
    assert not left, f"the test left behind: {left}"


def _world():
    nurseries = {one.pid for one in nursery._shared.values()}
    processes = {
        f"{process.pid} {' '.join(process.cmdline()[:4])}"
        for process in psutil.Process().children(recursive=True)
        if process.pid not in nurseries and _is_alive(process)
    }
    return {
        "processes": processes,
        "threads": {thread.name for thread in threading.enumerate()},
        "environment": {item for item in os.environ.items() if not item[0].startswith("PYTEST_")},
        "files": set(os.listdir(Path(__file__).parent.parent)) | _scratch(),
    }


def _scratch():
    return {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("paceline")}


def _is_alive(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _leaks(before, after):
    return {kind: after[kind] - before[kind] for kind in before if after[kind] - before[kind]}
