"""`paceline train launch` and `data launch` to a cluster with a token; and what `xp` finds of it, with the folder and
without."""

import json
import re
import secrets
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import paceline
from paceline.data.prepared_cleaning import entries
from paceline.experiment.new_project import make_project

pytestmark = pytest.mark.timeout(600)  # a job starts several programs with torch, which takes long on a busy machine

WAITING = """
import sys

import paceline

print("waiting", sys.argv[1:], flush=True)
while not paceline.should_stop():
    pass
print("leaving", flush=True)
"""
CONF = """
paceline.experiment.TrainConfig:
  _target_: paceline.experiment.TrainConfig
  name: digits
"""


@pytest.fixture(scope="module")
def launcher(cluster, tmp_path_factory):
    """Runs `paceline` as who launches to the cluster; `results=` is another results folder, as on another machine."""
    folder = tmp_path_factory.mktemp("launched")
    places = {name: folder / name for name in ("here", "elsewhere", "storage")}
    for place in places.values():
        place.mkdir()
    source = make_project(folder / "digits") / "src"
    (source / "experiment.py").write_text(Path(__file__).with_name("launched_experiment.py").read_text())
    (source / "conf.yaml").write_text(CONF)
    make_project(folder / "waits", "data_template")
    (folder / "waits/main.py").write_text(WAITING)

    def start(*words, cwd="digits", results="here", **variables):
        env = {**cluster.env, "NO_COLOR": "1", "PACELINE_RESULTS": str(places[results]), **variables}
        env |= {"PACELINE_STORAGE": str(places["storage"]), "XDG_CACHE_HOME": str(folder / "cache")}
        command, pipe = [sys.executable, "-m", "paceline", *words], subprocess.PIPE
        started.append(subprocess.Popen(command, cwd=folder / cwd, stdout=pipe, stderr=pipe, text=True, env=env))
        return started[-1]

    def run(*words, code=0, **where):
        return end_of(start(*words, **where), code)

    started = []
    run.start, run.places, run.address = start, places, ["--address", cluster.jobs]
    yield run
    for program in started:
        program.kill()
        program.communicate()


def end_of(program, code):
    """What it has printed, when it has ended with this code."""
    stdout, stderr = program.communicate(timeout=500)
    assert program.returncode == code, f"{stdout}\n{stderr}"
    return SimpleNamespace(stdout=stdout, stderr=stderr)


def test_sweep_is_launched_and_its_failed_run_goes_on_followed_and_is_found(launcher, wait_until):
    words = ["num_epochs=2", "train.batch_size=500"]
    told = launcher(
        "train", "launch", "-m", "start_workers=0,1", *words, "--prepare-batches", "--json", *launcher.address
    )
    assert len({json.loads(line)["job"] for line in told.stdout.splitlines()}) == 2
    logdir = launcher.places["here"] / "digits"  # by which they are found however long it takes until they begin
    ends = ["FAILED", "SUCCEEDED"]
    wait_until(lambda: sorted(run.status.state for run in paceline.list_runs(logdir)) == ends, "their ends", 500)
    badly, well = sorted(paceline.list_runs(logdir), key=lambda run: run.status.state)
    assert "not yet" in badly.status.reason
    assert [run.config["cfg"]["start_workers"] for run in (well, badly)] == [0, 1]
    assert [run.request["engine"] for run in (well, badly)] == ["inline", "ray"]
    assert [run.config["datasets"]["train"]["batch_size"] for run in (well, badly)] == [500, 500]
    sweep = well.config["sweep"]
    assert [run.request["parent"] for run in (well, badly)] == [{"sweep": sweep, "number": n, "of": 2} for n in (1, 2)]
    assert len(entries(launcher.places["storage"] / ".prepared")) == 3  # of both together

    (launcher.places["storage"] / "mended").touch()
    followed = launcher("train", "launch", "--resume", "start_workers=1", *words, *launcher.address, "--follow")
    assert re.findall(r"epoch ./2", followed.stdout) == ["epoch 2/2"]
    assert followed.stderr.endswith(f"{badly.name}: SUCCEEDED\n")

    words = ["xp", "ls", "--name", "digits", "--json", *launcher.address]
    here = json.loads(launcher(*words, "--filter", f"config.sweep={sweep}").stdout)
    there = json.loads(launcher(*words, results="elsewhere").stdout)
    ended = sorted((run.name, "SUCCEEDED") for run in (well, badly))
    assert [sorted((one["name"], one["state"]) for one in listed) for listed in (here, there)] == [ended, ended]
    assert [(one["job"], one["metrics"]["val_loss"]["last"] > 0) for one in here] == [(None, True)] * 2
    logs = launcher("xp", "logs", *badly.name.split("/"), results="elsewhere", RAY_ADDRESS=launcher.address[1])
    assert re.search(r"^epoch 2/2|^\[rank 0\] epoch 2/2", logs.stdout, re.MULTILINE)


def test_data_job_is_followed_and_stopped(launcher, wait_until):
    follower = launcher.start("data", "launch", "--follow", *launcher.address, "--rows", "many", cwd="waits")
    log = launcher.places["here"] / "waits/run_001/logs/rank_0.log"
    wait_until(lambda: log.exists() and "waiting ['--rows', 'many']" in log.read_text(), "its first line", 300)
    run = paceline.load_run(log.parents[1])
    stopped = launcher("xp", "stop", "waits", *launcher.address, results="elsewhere").stderr
    assert "waits/run_001: has stopped (STOPPED)" in stopped
    assert run.status.state == "STOPPED"
    assert "leaving" in log.read_text()
    followed = end_of(follower, code=1)
    assert "waiting ['--rows', 'many']" in followed.stdout
    assert followed.stderr.endswith("waits/run_001: STOPPED\n")


def test_cluster_with_a_token(launcher):
    assert "dashboard" in launcher("xp", "ray", *launcher.address).stdout
    wrong = launcher("xp", "ray", *launcher.address, code=2, RAY_AUTH_TOKEN=secrets.token_hex(32)).stderr
    none = launcher("data", "launch", *launcher.address, cwd="waits", code=2, RAY_AUTH_MODE="disabled").stderr
    for told in (wrong, none):
        assert "refuses. It asks for a token: set RAY_AUTH_MODE=token" in told
