"""Every example runs as its reader would run it, and does what it says."""

import ast
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

import paceline

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def run(tmp_path):
    """Runs an example in an empty folder and gives its output. Its runs go where the test session's go."""

    def run(name, *args, **variables):
        command, env = [sys.executable, EXAMPLES / name, *args], {**os.environ, **variables}
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=env, timeout=150)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_every_example_has_a_test():
    tested = {node.value for node in ast.walk(ast.parse(Path(__file__).read_text())) if isinstance(node, ast.Constant)}
    project = {
        str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("experiment/*/*.py")
    }  # as its main.py uses it
    examples = {str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*.py")} - project
    assert examples
    assert examples <= tested


def test_digits_learns_and_shows_it(run, tmp_path):
    shown = run("digits.py", "--epochs", "3", "--results", "here")
    rows = re.findall(r"│ +(\d+) │ +([\d.]+) │ +([\d.]+)% │", shown)
    epochs, losses, accuracies = zip(*rows, strict=True)
    assert epochs == ("1", "2", "3")
    assert float(losses[-1]) < float(losses[0]) / 2
    assert float(accuracies[-1]) > 85

    picture = tmp_path / "here/run_001/curves.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert str(picture) in "".join(shown.split()), "the path is shown, however it is wrapped"
    assert paceline.load_run(tmp_path / "here").status.state == "SUCCEEDED"


def test_resume_exactly(run):
    shown = run("resume_exactly.py")
    assert shown.endswith("undisturbed, killed and resumed runs end with the same weights, bit for bit\n")


def test_tune_digits_finds_a_learning_rate_and_stops_bad_trials(run, ray_cluster, tmp_path):
    address = ray_cluster.get_runtime_context().gcs_address
    shown = run("tune_digits.py", "--trials", "3", "--epochs", "4", "--results", "here", RAY_ADDRESS=address)
    *trials, best = shown.splitlines()[-4:]
    assert [line.split(":")[0] for line in trials] == ["lr=0.001", "lr=0.01", "lr=0.1"]
    assert trials[2].endswith("after 4 epochs")
    assert best == "best: lr=0.1, a model of 4810 weights"
    states = [paceline.load_run(path).status.state for path in sorted((tmp_path / "here/runs").iterdir())]
    assert set(states) <= {"SUCCEEDED", "STOPPED"}
    assert len(states) == 3


# The loss of an untrained model is ln 10 = 2.3. A single loss is that of a last, small batch: we look at the median.


def test_launched_script_learns_under_paceline_run_and_under_torchrun(run, tmp_path):
    script = str(EXAMPLES / "launch/digits.py")
    for launcher in (["paceline", "run", "-n", "2"], ["torch.distributed.run", "--standalone"]):
        command = [sys.executable, "-m", *launcher, script, "--epochs", "3"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=150)
        assert done.returncode == 0, done.stderr
        last = done.stdout.splitlines()[-1]
        assert "epoch 3: accuracy 0." in last
        assert float(last.split()[-1]) > 0.8
    recorded = paceline.list_runs()[0]
    assert recorded.request["function"]["name"] == "digits.py"
    assert recorded.metrics["epoch"].tolist() == [1, 1, 2, 2, 3, 3]


def test_porting_before(run):
    *epochs, returned = run("porting/before.py").splitlines()
    losses = [float(line.split("loss ")[1]) for line in epochs]
    assert len(losses) == 5
    assert statistics.median(losses) < 1
    assert f"{float(returned):.4f}" == f"{losses[-1]:.4f}"


def test_porting_after(run):
    returned = ast.literal_eval(run("porting/after.py"))
    metrics = paceline.list_runs()[0].metrics
    assert metrics["epoch"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert metrics["loss"].median() < 1
    assert metrics.query("epoch == 4")["loss"].tolist() == returned


def test_rows_larger_than_the_memory_limit_stream_through(run):
    shown = run("data/larger_than_memory.py", "--rows", "3_000_000", "--limit-mb", "60")
    sizes, memory, losses = shown.splitlines()
    assert int(sizes.split(" MB")[0]) > 60
    assert memory.endswith("within the limit")
    first, last = (float(number) for number in losses.removeprefix("loss ").split(" → "))
    assert last < first / 10


def test_ray_prepares_rows_while_workers_train(run, ray_cluster):
    address = ray_cluster.get_runtime_context().gcs_address
    assert run("data/ray_preprocessing.py", RAY_ADDRESS=address) == "trained on engine 'ray': y = 3.00 x\n"


def test_rows_of_a_run_with_killed_workers_are_audited(run):
    attempts, *table, verdict = run("data/killed_and_audited.py").splitlines()
    assert attempts == "attempts with 4, 4, 3 workers"
    assert [line.split()[-3:] for line in table if line.startswith("dataset  ") and "finished" in line] == [
        ["1800", "0", "0"],
        ["1800", "0", "0"],
    ]
    assert verdict == "every row exactly once"


def test_folds_show_their_mean_and_deviation(run):
    folds, summary = run("data/folds.py").splitlines()
    assert len(folds.split()) == 5
    assert all(float(accuracy) > 0.85 for accuracy in folds.split())
    assert float(summary.split()[1]) > 0.9


def test_trial_of_digits_runs_under_our_launcher(tmp_path):
    command = [sys.executable, "-m", "paceline", "run", "-n", "2", EXAMPLES / "trials/digits.py", "--epochs", "3"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    [accuracy] = re.findall(r"\[rank 0\] 3 epochs, accuracy ([\d.]+)%", done.stdout)
    assert float(accuracy) > 85


def test_typed_experiment_is_bound_and_trains_on_two_workers(run):
    shown = run("experiment/main.py", "cfg.num_epochs=3", "start_workers=2", "optimizers.adam.lr=1e-2", "seed=0")
    losses = [float(loss) for loss in re.findall(r"epoch \d/3 .* val_loss1 ([\d.]+)", shown)]
    assert len(losses) == 3
    assert losses[-1] < losses[0] / 2
    trained = paceline.load_run(shown.split()[-2])
    assert trained.config["cfg"]["start_workers"] == 2
    assert trained.metrics["rank"].nunique() == 2


def test_project_of_a_typed_experiment_passes_its_own_tests():
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-c",
        os.devnull,
        "--rootdir",
        ".",
        "tests",
    ]
    done = subprocess.run(command, cwd=EXAMPLES / "experiment", capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout
    assert "3 passed" in done.stdout
