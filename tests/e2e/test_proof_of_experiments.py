"""One experiment from its first line to TensorBoard, as a user goes: made, edited, bound, run on 2 workers, of which
one is killed, and then the driver too, resumed, listed, read and looked at. What is killed, shown or listened to is a
program of its own; what would import torch once more is not."""

import json
import os
import signal
import subprocess
import sys
import urllib.request

import pytest

import paceline

GATE = """            while epoch == 2 and not os.path.exists("go"):  # so that there is time to be killed
                time.sleep(0.01)
            with self.stage("train"):
"""


@pytest.fixture
def mlx(tmp_path):
    """The command, under the name that it was given first, in a folder of its own."""
    started = []
    environ = {**os.environ, "PACELINE_RESULTS": str(tmp_path / "results"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    (tmp_path / "digits").mkdir()

    def start(*words):
        command = [sys.executable, "-m", "paceline", *words]
        pipe, cwd = subprocess.PIPE, tmp_path / "digits"
        child = subprocess.Popen(command, cwd=cwd, env=environ, stdout=pipe, stderr=pipe, text=True)
        started.append(child)
        return child

    def mlx(*words, code=0):
        child = start(*words)
        out, told = child.communicate(timeout=120)
        assert child.returncode == code, f"{out}\n{told}"
        return out, told

    mlx.start = start
    yield mlx
    for child in started:
        child.kill()
        child.communicate()


def test_experiment_from_its_first_line_to_tensorboard(mlx, work_in, call, tmp_path, wait_until, wait_for_end):
    mlx("new", "../digits")
    project = tmp_path / "digits"
    work_in(project, tmp_path / "results")
    edit(project / "src/model.py", "input_size: int = 180):", "input_size: int = 180, dropout: float = 0.0):")
    edit(project / "src/experiment.py", '            with self.stage("train"):\n', GATE)
    edit(project / "src/experiment.py", "import torch\n", "import os\nimport time\n\nimport torch\n")
    conf = project / "src/conf.yaml"
    edit(conf, "num_epochs: 10", "num_epochs: 4  # enough for today")
    edit(conf, "start_workers: 1", "start_workers: 2")
    edit(conf, "seed: null", "seed: 7")
    _, told = call("train", "bind")
    assert "added: models.dnn.block.dropout\n" in told
    assert "num_epochs: 4  # enough for today\n" in conf.read_text()

    driver = mlx.start("train", "run", "optimizers.adam.lr=1e-2")
    run_dir = tmp_path / "results/digits/run_001"
    saved = run_dir / "checkpoints/checkpoint_000002"
    wait_until(saved.exists, "the checkpoint of the second epoch", within_s=120)
    first = paceline.load_run(run_dir).status.worker_pids
    os.kill(first[1], signal.SIGKILL)
    wait_until(lambda: not {*first} & {*paceline.load_run(run_dir).status.worker_pids}, "new workers")
    workers = [*first, *paceline.load_run(run_dir).status.worker_pids]
    driver.kill()
    assert "epoch 2/4" in driver.communicate()[0]
    wait_for_end(workers)
    assert listed(mlx)["state"] == "LOST"

    (project / "go").touch()
    out, told = call("train", "run", "optimizers.adam.lr=1e-2", "--resume", "--json")
    assert json.loads(out)["state"] == "SUCCEEDED", told

    row = listed(mlx)
    assert (row["name"], row["state"], row["num_workers"]) == ("digits/run_001", "SUCCEEDED", 2)
    metrics = paceline.load_run(run_dir).metrics
    validated = metrics[metrics["batch"].isna() & (metrics["rank"] == 0)]
    assert validated["epoch"].tolist() == [0, 1, 2, 3]
    assert validated["val_loss1"].is_monotonic_decreasing
    lines = mlx("xp", "logs", "digits", "1", "--rank", "0", "--grep", "epoch 4/4")[0].splitlines()
    assert len(lines) == 1
    assert "val_loss1" in mlx("xp", "show", "digits")[0]

    board = mlx.start("xp", "board", "digits", "run_001", "--no-browser")
    url = board.stdout.readline().strip()
    with urllib.request.urlopen(
        f"{url}data/plugin/scalars/scalars?run=digits/run_001&tag=val_loss1", timeout=60
    ) as answer:
        points = json.load(answer)
    assert points[-1][1:] == [row["num_steps"], pytest.approx(row["metrics"]["val_loss1"]["last"])]
    assert "Ctrl-C ends it" in board.stderr.readline()
    board.send_signal(signal.SIGINT)
    assert board.wait(60) == 130


def edit(path, old, new):
    text = path.read_text()
    assert text.count(old) == 1, (path, old)
    path.write_text(text.replace(old, new))


def listed(mlx):
    [row] = json.loads(mlx("xp", "ls", "--json")[0])
    return row
