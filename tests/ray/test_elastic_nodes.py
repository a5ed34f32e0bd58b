"""An elastic run on a cluster whose nodes die, come and are drained."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "elastic_nodes.py"


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    soon = {"initial_delay_ms": 1000, "period_ms": 500, "failure_threshold": 4}
    env = {**os.environ, **{f"RAY_health_check_{name}": str(value) for name, value in soon.items()}}
    enough = tmp_path_factory.mktemp("elastic") / "enough"
    done = subprocess.run([sys.executable, PROGRAM, enough], capture_output=True, text=True, env=env, timeout=170)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_group_follows_the_cluster(story):
    """A node dies and is not replaced, a larger one comes, and that one is drained."""
    assert story["resizes"][0] == [2, 1], "began with what there was, went on with what was left"
    assert story["resizes"][-1] == [3, 1]
    assert story["state"] == "SUCCEEDED"
    assert [value[:2] for value in story["values"]] == [[0, 1]]


def test_causes_are_told_apart(story):
    causes = [cause for cause, _ in story["restarts"]]
    assert causes[0] == "loss"
    assert causes[-1] == "preemption"
    assert set(causes[1:-1]) == {"growth"}
    assert "being drained" in story["restarts"][-1][1]
    assert "preempted" in story["events"]
    assert story["events"].count("resize") == len(story["resizes"])


def test_no_committed_step_is_lost(story):
    assert story["steps"] == list(range(1, len(story["steps"]) + 1))


def test_drained_node_is_left(story):
    assert story["drained"] not in story["last_nodes"]
