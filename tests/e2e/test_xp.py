"""`paceline xp` as programs, beside a run that goes on."""

import json
import os
import signal
import subprocess
import sys
import textwrap

import psutil
import pytest

import paceline

PACELINE = [sys.executable, "-m", "paceline"]
SCRIPT = """
    import time
    import paceline
    from paceline import BackendConfig, Trainer

    def train():
        step = 0
        while not paceline.should_stop():
            step += 1
            print(f"step {step}", flush=True)
            paceline.report(loss=1 / step)
            time.sleep(0.02)
        paceline.save_checkpoint(step=step)
        print("saved", flush=True)

    with Trainer(BackendConfig(), num_workers=2, logdir="live") as trainer:
        trainer.run(train)
"""


@pytest.fixture
def environ(tmp_path):
    return {**os.environ, "PACELINE_RESULTS": str(tmp_path / "results"), "XDG_CACHE_HOME": str(tmp_path / "cache")}


@pytest.fixture
def start(tmp_path, environ):
    started = []

    def start(*command):
        child = subprocess.Popen(
            command, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        started.append(child)
        return child

    yield start
    for child in started:
        child.kill()
        child.communicate()


@pytest.fixture
def xp(tmp_path, environ):
    def xp(*words):
        return subprocess.run([*PACELINE, "xp", *words], env=environ, cwd=tmp_path, capture_output=True, text=True)

    return xp


def test_live_run_is_listed_followed_and_stopped(start, xp, tmp_path, wait_until):
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    driver = start(sys.executable, "train.py")
    wait_until(lambda: json.loads(xp("ls", "--json").stdout or "[]")[:1] != [], "the run")
    follower = start(*PACELINE, "xp", "logs", "live")
    lines = [follower.stdout.readline() for _ in range(5)]
    assert all(line.startswith("[rank ") for line in lines), follower.stderr.read()
    [row] = json.loads(xp("ls", "--json").stdout)
    assert (row["name"], row["state"], row["num_workers"]) == ("live/run_001", "RUNNING", 2)
    detached = start(*PACELINE, "xp", "logs", "live", "--rank", "0")
    detached.stdout.readline()
    detached.send_signal(signal.SIGINT)
    _, said = detached.communicate(timeout=60)
    assert (detached.returncode, "live/run_001 goes on." in said) == (130, True)
    assert xp("rm", "live").returncode == 2
    assert xp("wait", "live", "--timeout", "0").returncode == 124
    stopped = xp("stop", "live")
    assert (stopped.returncode, stopped.stdout) == (0, ""), stopped.stderr
    driver.wait(60)
    rest, said = follower.communicate(timeout=60)
    assert rest.count("saved") == 2
    assert "live/run_001: STOPPED" in said
    assert follower.returncode == 0
    assert "has ended already" in xp("stop", "live").stderr
    assert xp("wait", "live").returncode == 1
    run = paceline.load_run(tmp_path / "results" / "live")
    assert len(run.checkpoints) == 1


def test_run_that_does_not_listen_is_killed(start, xp, tmp_path, wait_until, wait_for_end):
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT).replace("not paceline.should_stop()", "True"))
    driver = start(sys.executable, "train.py")
    run_dir = tmp_path / "results" / "live" / "run_001"
    wait_until(lambda: (run_dir / "metrics.jsonl").exists() and (run_dir / "metrics.jsonl").stat().st_size, "a step")
    workers = paceline.load_run(run_dir).status.worker_pids
    stopped = xp("stop", "live", "--kill", "--timeout", "0")
    assert "was killed (LOST)" in stopped.stderr
    assert driver.wait(60) == -signal.SIGKILL
    wait_for_end(workers)
    assert json.loads(xp("ls", "--json").stdout)[0]["state"] == "LOST"


def test_listing_imports_nothing_heavy(tmp_path, environ):
    code = (
        "import sys; from paceline.cli.app import build\n"
        "build('xp')(['xp', 'ls', '-n', '5', '--state', 'FAILED'], standalone_mode=False); print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    heavy = {
        "torch",
        "ray",
        "pandas",
        "numpy",
        "fsspec",
        "rich",
        "pydantic",
        "paceline.trainer",
        "paceline.checkpoints",
        "paceline.cli.train",
        "paceline.cli.data",
    }
    assert heavy & {*done.stdout.split()} == set()


def test_names_are_completed_by_bash(tmp_path, environ):
    """By its own completion, with the script that `--install-completion` installs."""
    from paceline.runs import RunFolder

    for _ in range(2):
        RunFolder.create(tmp_path / "results" / "digits").close()
    program = tmp_path / "bin" / "mlx"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nfrom paceline.cli import main\nmain()\n")
    program.chmod(0o755)
    command = [sys.executable, "-m", "paceline", "--show-completion", "bash"]
    shown = subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout
    assert "complete -o default -F _paceline_completion paceline" in shown, "and not one of python"
    typed = (
        'source <(_MLX_COMPLETE=source_bash mlx); tab() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1));'
        ' _mlx_completion mlx; echo "${COMPREPLY[@]}"; };'
        ' complete -p mlx; tab mlx xp show dig; tab mlx xp logs digits ""; tab mlx xp ta;'
        " tab mlx xp ls --state S"
    )
    path = f"{program.parent}{os.pathsep}{environ['PATH']}"
    done = subprocess.run(
        ["bash", "--norc", "-c", typed], env={**environ, "PATH": path}, capture_output=True, text=True, check=True
    )
    assert [sorted(line.split()) for line in done.stdout.splitlines()[1:]] == [
        ["digits", "digits/run_001", "digits/run_002"],
        ["latest", "run_001", "run_002"],
        ["tag"],
        ["STOPPED", "SUCCEEDED"],
    ], done.stderr


def test_board_is_served_on_the_loopback(start, tmp_path):
    import urllib.request

    from paceline.runs import RunFolder

    with RunFolder.create(tmp_path / "results" / "digits") as folder:
        for step in range(1, 4):
            folder.record_step(step, 0, [{"loss": 1 / step}])
        folder.set_state("SUCCEEDED")
    board = start(*PACELINE, "xp", "board", "digits", "--no-browser")
    url = board.stdout.readline().strip()
    assert url.startswith("http://127.0.0.1:"), board.stderr.read()
    with urllib.request.urlopen(f"{url}data/runs", timeout=60) as answer:
        assert json.load(answer) == ["digits/run_001"]
    [served] = psutil.Process(board.pid).children()
    assert not any("tensorflow" in one.path for one in served.memory_maps()), "it takes many seconds to import"
    assert "Ctrl-C ends it" in board.stderr.readline()
    board.send_signal(signal.SIGINT)
    assert board.wait(60) == 130
