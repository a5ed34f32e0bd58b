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
    """Runs an example in an empty folder, and gives its output. Its runs go where the test session's go."""

    def run(name, *args, **variables):
        command, env = [sys.executable, EXAMPLES / name, *args], {**os.environ, **variables}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=150)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture
def read(readers, tmp_path):
    """The same, for an example that needs nothing but its framework: in a process that it shares with others."""

    def read(name, *args, framework="torch"):
        done = readers[framework].run(EXAMPLES / name, *args, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return read


def test_every_example_has_a_test():
    here = ast.walk(ast.parse(Path(__file__).read_text()))
    tested = {node.value for node in here if isinstance(node, ast.Constant)}
    with_horovod = (Path(__file__).parents[1] / "procs/horovod_for_real.py").read_text()  # by `make test-horovod`
    tested |= {f"porting/{name}" for name in re.findall(r'EXAMPLES / "(\w+\.py)"', with_horovod)}
    modules = ("experiment/*/*.py", "distributed_sgd/sgd.py", "distributed_sgd/test_model.py")
    project = {str(path.relative_to(EXAMPLES)) for one in modules for path in EXAMPLES.rglob(one)}  # used by others
    examples = {str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*.py")} - project
    assert examples
    assert examples <= tested


def test_digits_learns_and_shows_it(read, tmp_path):
    shown = read("digits.py", "--epochs", "3", "--results", "here")
    rows = re.findall(r"│ +(\d+) │ +([\d.]+) │ +([\d.]+)% │", shown)
    epochs, losses, accuracies = zip(*rows, strict=True)
    assert epochs == ("1", "2", "3")
    assert float(losses[-1]) < float(losses[0]) / 2
    assert float(accuracies[-1]) > 85

    picture = tmp_path / "here/run_001/curves.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert str(picture) in "".join(shown.split()), "the path is shown, however it is wrapped"
    assert paceline.load_run(tmp_path / "here").status.state == "SUCCEEDED"


def test_resume_exactly(read):
    shown = read("resume_exactly.py")
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


def test_porting_before(read):
    *epochs, returned = read("porting/before.py").splitlines()
    losses = [float(line.split("loss ")[1]) for line in epochs]
    assert len(losses) == 5
    assert statistics.median(losses) < 1
    assert f"{float(returned):.4f}" == f"{losses[-1]:.4f}"


def test_porting_after(read):
    returned = ast.literal_eval(read("porting/after.py"))
    metrics = paceline.list_runs()[0].metrics
    assert metrics["epoch"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert metrics["loss"].median() < 1
    assert metrics.query("epoch == 4")["loss"].tolist() == returned


def test_porting_tensorflow_before_and_after(read):
    assert float(read("porting/tensorflow_before.py", framework="tensorflow").splitlines()[-1]) > 0.9
    returned = ast.literal_eval(read("porting/tensorflow_after.py", framework="tensorflow").splitlines()[-1])
    metrics = paceline.list_runs()[0].metrics
    assert metrics["epoch"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert metrics.query("epoch == 4")["accuracy"].tolist() == returned
    assert returned[0] > 0.9


def test_jax_digits_learns(read):
    *epochs, last = read("jax_digits.py", "--epochs", "3", "--results", "here", framework="jax").splitlines()
    accuracies = re.findall(r"^epoch \d: loss [\d.]+, accuracy ([\d.]+)%$", "\n".join(epochs), re.MULTILINE)
    assert len(accuracies) == 3
    assert float(accuracies[-1]) > 80
    assert last.startswith("The run is in ")


def test_porting_jax_before_and_after_end_with_the_same_loss(read):
    *epochs, before = read("porting/jax_before.py", framework="jax").splitlines()
    assert [line.split(":")[0] for line in epochs] == [f"epoch {number}" for number in range(5)]
    after = ast.literal_eval(read("porting/jax_after.py", framework="jax").splitlines()[-1])
    assert after == pytest.approx([float(before)] * 2, rel=1e-4)
    metrics = paceline.list_runs()[0].metrics
    assert metrics["epoch"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert metrics["loss"].median() < 1


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


def test_folds_show_their_mean_and_deviation(read):
    folds, summary = read("data/folds.py").splitlines()
    assert len(folds.split()) == 5
    assert all(float(accuracy) > 0.85 for accuracy in folds.split())
    assert float(summary.split()[1]) > 0.9


def test_trial_of_digits_runs_under_our_launcher(tmp_path):
    command = [sys.executable, "-m", "paceline", "run", "-n", "2", EXAMPLES / "trials/digits.py", "--epochs", "3"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    [accuracy] = re.findall(r"\[rank 0\] 3 epochs, accuracy ([\d.]+)%", done.stdout)
    assert float(accuracy) > 85


def launched(name, tmp_path, preload):
    """What an example prints under `paceline run`, and its run."""
    command = [sys.executable, "-m", "paceline", "run", "-n", "2", "--preload", preload, EXAMPLES / name]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    return done.stdout, paceline.list_runs()[0]


def test_trainer_of_hugging_face_is_a_run(tmp_path):
    shown, run = launched("integrations/hugging_face.py", tmp_path, "paceline.integrations.transformers")
    [accuracy] = re.findall(r"\[rank 0\] accuracy ([\d.]+)", shown)
    assert float(accuracy) > 0.8
    assert "[rank 1] accuracy" not in shown
    assert len(run.metrics.dropna(subset="eval_accuracy")) == 2 * 4
    assert len(run.checkpoints) == 3


def test_lightning_goes_on_after_a_kill(run, tmp_path):
    assert "the same as undisturbed: True\n" in run("integrations/lightning_trainer.py")
    assert (tmp_path / "killed_once").exists()


def test_loop_with_fabric_is_a_run(tmp_path):
    shown, run = launched("integrations/fabric.py", tmp_path, "paceline.integrations.fabric")
    assert "[rank 0] epoch 6: loss 0." in shown
    assert run.metrics["epoch"].tolist() == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]
    assert len(run.checkpoints) == 6


def test_folds_of_scikit_learn_are_dealt_to_workers(read):
    shown = read("integrations/scikit_learn.py").splitlines()
    assert shown[0] == "6 folds on 2 workers"
    assert float(dict(line.split() for line in shown[2:])["mean"]) > 0.9


def test_group_of_xgboost_loses_a_worker_and_builds_the_same_trees(read, tmp_path):
    shown = read("integrations/xgboost_group.py").splitlines()
    assert shown[-2:] == ["the same trees on both ranks: True", "and as if nobody was killed: True"]
    assert (tmp_path / "killed_once").exists()


def test_typed_experiment_is_bound_and_trains_on_two_workers(read):
    shown = read("experiment/main.py", "cfg.num_epochs=3", "start_workers=2", "optimizers.adam.lr=1e-2", "seed=0")
    losses = [float(loss) for loss in re.findall(r"epoch \d/3 .* val_loss1 ([\d.]+)", shown)]
    assert len(losses) == 3
    assert losses[-1] < losses[0] / 2
    trained = paceline.load_run(shown.split()[-2])
    assert trained.config["cfg"]["start_workers"] == 2
    assert trained.metrics["rank"].nunique() == 2


def test_project_of_a_typed_experiment_passes_its_own_tests(readers):
    words = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", ".", "tests"]
    done = readers["torch"].run(Path(__file__).with_name("own_tests.py"), *words, cwd=EXAMPLES / "experiment")
    assert done.returncode == 0, done.stdout
    assert "3 passed" in done.stdout


def test_loop_on_the_driver_learns(read):
    *steps, accuracy = read("driven_loop.py", "--epochs", "2").splitlines()
    losses = [float(line.split("loss: ")[1]) for line in steps]
    assert len(losses) == 4
    assert losses[-1] < losses[0] / 2
    assert float(accuracy.removeprefix("accuracy ")) > 0.6


def test_template_of_distributed_sgd(run, ray_cluster, imported_on_ray):
    """At each step: two workers compute, then all have; the mean is made; two workers apply it; and the loss."""
    address = ray_cluster.get_runtime_context().gcs_address
    with imported_on_ray("tensorflow"):
        lines = run("distributed_sgd/template.py", "--steps", "3", RAY_ADDRESS=address).splitlines()
    told = [line for line in lines if " time " in line or line.startswith("Current loss")]
    names, numbers = zip(*(line.rsplit(" ", 1) for line in told), strict=True)
    step = [
        *["compute grad interior time"] * 2,
        "compute all grads time",
        "grad reduce time",
        *["apply grad interior time"] * 2,
        "apply all grads time",
        "Current loss",
    ]
    assert list(names) == step * 3
    losses = [float(number) for number in numbers[7::8]]
    assert losses == sorted(losses, reverse=True)
    assert 6 < losses[0] < 8, "of 1000 classes, ln 1000 = 6.9"
