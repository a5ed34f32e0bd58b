"""`paceline train launch` and `data launch` to a cluster with a token; and what `xp` finds of it, with the folder and
without."""

import json
import os
import re
import secrets
import subprocess
import sys
from types import SimpleNamespace

import pytest

import paceline
from paceline.experiment.new_project import make_project

pytestmark = pytest.mark.timeout(600)  # a job starts several programs with torch, which takes long on a busy machine

WAITING = """
import paceline

print("waiting", flush=True)
while not paceline.should_stop():
    pass
print("leaving", flush=True)
"""


@pytest.fixture(scope="module")
def launcher(cluster, tmp_path_factory):
    """Runs `paceline` as who launches to the cluster; `results=` is another results folder, as on another machine."""
    folder = tmp_path_factory.mktemp("launched")
    places = {name: folder / name for name in ("here", "elsewhere", "storage")}
    for place in places.values():
        place.mkdir()
    make_project(folder / "digits")
    make_project(folder / "circles", "data_template")
    make_project(folder / "waits", "data_template")
    (folder / "waits/main.py").write_text(WAITING)

    def run(*words, cwd="digits", code=0, results="here", **variables):
        env = {**cluster.env, "NO_COLOR": "1", "PACELINE_RESULTS": str(places[results]), **variables}
        env |= {"PACELINE_STORAGE": str(places["storage"]), "XDG_CACHE_HOME": str(folder / "cache")}
        command = [sys.executable, "-m", "paceline", *words]
        done = subprocess.run(command, cwd=folder / cwd, capture_output=True, text=True, env=env, timeout=500)
        assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
        return SimpleNamespace(stdout=done.stdout, stderr=done.stderr)

    run.places, run.address = places, ["--address", cluster.jobs]
    return run


def test_experiment_is_launched_followed_and_found(launcher):
    words = ["train", "launch", "num_epochs=1", "start_workers=1", "train.batch_size=500", *launcher.address]
    followed = launcher(*words, "--follow")
    assert "epoch 1/1" in followed.stdout
    assert followed.stderr.endswith("digits/run_001: SUCCEEDED\n")
    run = paceline.load_run(launcher.places["here"] / "digits/run_001")
    assert run.request["engine"] == "ray"
    assert run.config["datasets"]["train"]["batch_size"] == 500

    [here] = json.loads(launcher("xp", "ls", "--name", "digits", "--json", *launcher.address).stdout)
    assert (here["job"], here["metrics"]["loss1"]["last"] > 0) == (None, True)
    [there] = json.loads(
        launcher("xp", "ls", "--name", "digits", "--json", *launcher.address, results="elsewhere").stdout
    )
    assert (there["name"], there["state"]) == ("digits/run_001", "SUCCEEDED")
    logs = launcher("xp", "logs", "dig", "1", results="elsewhere", RAY_ADDRESS=launcher.address[1])
    assert re.search(r"^epoch 1/1|^\[rank 0\] epoch 1/1", logs.stdout, re.MULTILINE)


def test_data_job_is_launched_and_stopped(launcher, wait_until):
    told = json.loads(launcher("data", "launch", "--json", *launcher.address, cwd="waits").stdout)
    assert told["run"] == "waits/run_001"
    run = paceline.load_run(told["path"])
    log = run.path / "logs/rank_0.log"
    wait_until(lambda: log.exists() and "waiting" in log.read_text(), "its first line")
    stopped = launcher("xp", "stop", "waits", *launcher.address, results="elsewhere").stderr
    assert "waits/run_001: has stopped (STOPPED)" in stopped
    assert run.status.state == "STOPPED"
    assert "leaving" in log.read_text()


def test_data_job_that_fails(launcher):
    failed = launcher("data", "launch", "--follow", *launcher.address, "--rows", "many", cwd="circles", code=1)
    assert "invalid int value: 'many'" in failed.stdout
    assert failed.stderr.endswith("circles/run_001: FAILED\n")
    assert os.listdir(launcher.places["storage"]) == []


def test_cluster_with_a_token(launcher):
    assert "dashboard" in launcher("xp", "ray", *launcher.address).stdout
    wrong = launcher("xp", "ray", *launcher.address, code=2, RAY_AUTH_TOKEN=secrets.token_hex(32)).stderr
    none = launcher("data", "launch", *launcher.address, cwd="circles", code=2, RAY_AUTH_MODE="disabled").stderr
    for told in (wrong, none):
        assert "refuses. It asks for a token: set RAY_AUTH_MODE=token" in told
