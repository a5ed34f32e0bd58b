"""MLflow, Weights & Biases and notebooks, for real: their own packages, in processes of their own, offline.

The scripts run in interpreters that refuse to look up a host name or to connect to anything but a local socket, and
write down that they were asked to: trackers that phone home, as both do unless told otherwise, are found out. (wandb's
own service process is outside this watch.) To import a tracker takes seconds: one interpreter runs all the scripts, and
a second one those of a driver that comes after another.
"""

import contextlib
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from wandb_file import read_wandb_file

SOURCE_DIR = Path(__file__).parents[2] / "src"

INTERPRETER = """
import atexit, contextlib, io, json, os, socket, sys, traceback
attempts = []
# Registered before anything is imported, so it runs after the exit handlers of the trackers.
atexit.register(lambda: print(json.dumps(attempts), file=open(sys.argv[1], "w")))
def watch(event, args):
    if event == "socket.getaddrinfo" or (event == "socket.connect" and args[0].family != socket.AF_UNIX):
        attempts.append(f"{event} {args[1:]}")
        raise OSError(f"no network in this test: {event}")
sys.addaudithook(watch)
def drive(callback, config=None, status="SUCCEEDED", steps=((1, 0.5), (2, 0.25)), saves_at=(), is_resumed=False):
    error = status == "FAILED"
    callback.start_training(
        run_dir, config or {}, run_id="run_001", num_workers=2, world_size=2, is_resumed=is_resumed
    )
    for step, loss, *size in steps:
        stamps = {"_training_iteration": step, "_timestamp": 1, "_pid": 2}
        first = {"loss": loss, "nested": {"a": step}, "name": "x", **stamps}
        callback.handle_result([first, {"loss": 9, **stamps}][:size[0] if size else 2])
        if step in saves_at:
            callback.handle_checkpoint(None)
    if status != "LOST":
        callback.finish_training(error=error, status=status, exception=ValueError("x") if error else None)
print("ready", flush=True)
for line in sys.stdin:
    run_dir, source = json.loads(line)
    os.chdir(run_dir)
    variables, said, error = dict(os.environ), io.StringIO(), None
    try:
        with contextlib.redirect_stdout(said):
            exec(source, {"drive": drive, "json": json, "os": os, "run_dir": run_dir})
    except BaseException:
        error = traceback.format_exc()
    os.environ.clear()
    os.environ.update(variables)
    print(json.dumps({"said": said.getvalue(), "error": error, "attempts": attempts}), flush=True)
"""


@pytest.fixture(scope="module")
def run_script(tmp_path_factory):
    """Runs a script and returns what it printed last, as JSON."""
    with interpreter(tmp_path_factory.mktemp("first")) as run_script:
        yield run_script


@pytest.fixture(scope="module")
def run_later(tmp_path_factory):
    """The same, in the process of a later driver."""
    with interpreter(tmp_path_factory.mktemp("later")) as run_script:
        yield run_script


@contextlib.contextmanager
def interpreter(home):
    """Makes sure that no script tried the network, nor the trackers when the interpreter ended."""
    outside = {
        name: value
        for name, value in os.environ.items()
        # MLflow and wandb behave better under a test runner than they do for users.
        if not name.startswith(("PYTEST_", "MLFLOW_", "WANDB_", "CI", "GITHUB_")) and name != "DO_NOT_TRACK"
    }
    command = [sys.executable, "-c", INTERPRETER, str(home / "attempts")]
    env, pipe = {**outside, "PYTHONPATH": str(SOURCE_DIR), "HOME": str(home)}, subprocess.PIPE
    with subprocess.Popen(command, env=env, cwd=home, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout.readline() == "ready\n"

        def run_script(source, run_dir):
            run_dir.mkdir(parents=True, exist_ok=True)
            process.stdin.write(json.dumps([str(run_dir), textwrap.dedent(source)]) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
            assert line, f"the interpreter ended with {process.wait()}"
            answer = json.loads(line)
            assert answer["error"] is None, answer["said"] + answer["error"]
            assert answer["attempts"] == []
            return json.loads(answer["said"].splitlines()[-1])

        yield run_script
        process.stdin.close()
    assert process.returncode == 0
    assert json.loads((home / "attempts").read_text()) == []


MLFLOW = """
from paceline.callbacks import MLflowLoggerCallback
{setup}
before = dict(os.environ)
callback = MLflowLoggerCallback({arguments})
drive(callback, {drive})
from mlflow.tracking import MlflowClient
os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
client = MlflowClient({store})
run = client.get_run(callback.mlflow_run_id)
def history_of(key):
    return [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, key)]
history = {{key: history_of(key) for key in run.data.metrics}}
del os.environ["MLFLOW_ALLOW_FILE_STORE"]
print(json.dumps({{
    "run_id": run.info.run_id, "status": run.info.status, "name": run.info.run_name,
    "params": run.data.params, "history": history,
    "tags": run.data.tags, "experiment": client.get_experiment(run.info.experiment_id).name,
    "artifacts": [f.path for f in client.list_artifacts(run.info.run_id, "checkpoints")],
    "ended": run.info.end_time is not None,
    "variables": sorted(set(os.environ) ^ set(before)),
}}))
"""


def mlflow_script(arguments="", drive="", setup="", store="f'{run_dir}/mlruns'"):
    return MLFLOW.format(arguments=arguments, drive=drive, setup=setup, store=store)


def test_mlflow_in_the_run_folder(tmp_path, run_script):
    run_dir = tmp_path / "sgd_1" / "run_001"
    script = mlflow_script('tags={"team": 7}', 'config={"lr": 0.1, "model": {"layers": [1, 2]}, "odd key!": 1}')
    found = run_script(script, run_dir)
    assert found["status"] == "FINISHED"
    assert found["ended"]
    assert found["name"] == "run_001"
    assert found["experiment"] == "sgd_1"
    assert found["params"] == {"lr": "0.1", "model/layers": "[1, 2]", "odd key_": "1"}
    assert found["history"] == {"loss": [[1, 0.5], [2, 0.25]], "nested/a": [[1, 1.0], [2, 2.0]]}
    assert found["tags"]["team"] == "7"
    assert found["variables"] == [], "the environment is as it was"


def test_mlflow_is_told_of_a_stop(tmp_path, run_script):
    found = run_script(mlflow_script(drive='status="STOPPED"'), tmp_path / "run_001")
    assert found["status"] == "KILLED"
    assert found["history"]["loss"] == [[1, 0.5], [2, 0.25]]


def test_mlflow_gets_the_checkpoints(tmp_path, run_script):
    checkpoint_dir = tmp_path / "run_001" / "checkpoints" / "checkpoint_000001"
    checkpoint_dir.mkdir(parents=True)
    (checkpoint_dir / "data").write_text("x")
    arguments = f"logdir={str(tmp_path / 'tracking')!r}, save_artifact=True, experiment_name='mine', worker_to_log=1"
    script = mlflow_script(arguments, store=repr(str(tmp_path / "tracking" / "mlruns")))
    found = run_script(script, tmp_path / "run_001")
    assert found["artifacts"] == ["checkpoints/checkpoint_000001"]
    assert found["experiment"] == "mine"
    assert found["history"] == {"loss": [[1, 9.0], [2, 9.0]]}


def test_mlflow_experiment_by_id_and_by_a_wrong_one(tmp_path, run_script):
    setup = """
os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
from mlflow.tracking import MlflowClient
known = MlflowClient(f"{run_dir}/mlruns").create_experiment("made before")
from paceline.errors import ArgumentError
try:
    drive(MLflowLoggerCallback(experiment_id="31415"))
    raise SystemExit("not refused")
except ArgumentError as error:
    assert "no experiment with the id '31415'" in str(error), error
try:
    MLflowLoggerCallback(experiment_id="1", experiment_name="x")
    raise SystemExit("not refused")
except ArgumentError as error:
    assert "Give one of them" in str(error), error
"""
    found = run_script(mlflow_script("experiment_id=known", setup=setup), tmp_path / "run_001")
    assert found["experiment"] == "made before"


def test_mlflow_goes_on_with_the_run_of_a_lost_driver(tmp_path, run_script, run_later):
    run_dir = tmp_path / "sgd_1" / "run_001"
    # An object without a repr of its own has another text in every process, and MLflow refuses a changed param.
    drive = 'status="LOST", steps=[(1, 1), (2, 2), (3, 3), (4, 4)], saves_at=[3], config={"lr": 0.1, "o": object()}'
    before = run_script(mlflow_script(drive=drive), run_dir)
    assert (before["status"], before["history"]["loss"]) == ("RUNNING", [[1, 1.0], [2, 2.0], [3, 3.0]])
    drive = 'is_resumed=True, steps=[(4, 40), (5, 50)], config={"lr": 0.1, "o": object(), "more": 1}'
    found = run_later(mlflow_script(drive=drive), run_dir)
    assert found["run_id"] == before["run_id"]
    assert found["history"]["loss"] == [[1, 1.0], [2, 2.0], [3, 3.0], [4, 40.0], [5, 50.0]]
    assert found["params"] == {**before["params"], "more": "1"}
    assert found["status"] == "FINISHED"


def test_mlflow_run_is_running_again_after_it_failed(tmp_path, run_script, run_later):
    before = run_script(mlflow_script(drive='status="FAILED"'), tmp_path / "run_001")
    drive = 'is_resumed=True, status="LOST", steps=[(2, 7)]'
    found = run_later(mlflow_script(drive=drive), tmp_path / "run_001")
    assert (before["status"], found["status"]) == ("FAILED", "RUNNING")
    assert before["history"]["loss"] == [[1, 0.5], [2, 0.25]]
    assert found["run_id"] == before["run_id"]
    assert found["history"]["loss"] == [[1, 0.5], [2, 0.25], [2, 7.0]], "both values of the step made again"


def test_mlflow_run_is_gone(tmp_path, run_script, run_later):
    """Deleted in MLflow; and the one after it, on the disk."""
    before = run_script(mlflow_script(), tmp_path / "run_001")
    before = go_on_without(run_later, before, "client.delete_run(kept)", tmp_path / "run_001")
    remove = "shutil.rmtree(*glob.glob(f'{run_dir}/mlruns/*/{kept}'))"
    go_on_without(run_script, before, remove, tmp_path / "run_001")


def go_on_without(run_script, before, remove, run_dir):
    setup = f"""
import glob, shutil
os.environ["MLFLOW_ALLOW_FILE_STORE"] = os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
from mlflow.tracking import MlflowClient
client, kept = MlflowClient(f"{{run_dir}}/mlruns"), {before["run_id"]!r}
{remove}
"""
    found = run_script(mlflow_script(drive="is_resumed=True", setup=setup), run_dir)
    assert found["run_id"] != before["run_id"]
    assert found["history"]["loss"] == [[1, 0.5], [2, 0.25]]
    return found


def test_mlflow_keeps_no_password_and_leaves_out_steps_without_the_worker(tmp_path, run_script):
    store = tmp_path / "tracking"
    # For a folder, MLflow takes no notice of user and password.
    arguments = f"tracking_uri='file://me:secret@localhost{store}', worker_to_log=1"
    script = mlflow_script(arguments, drive="steps=[(1, 1, 2), (2, 2, 1), (3, 3, 2)]", store=repr(str(store)))
    found = run_script(script, tmp_path / "run_001")
    assert found["history"]["loss"] == [[1, 9.0], [3, 9.0]]
    kept = json.loads((tmp_path / "run_001" / "tracked_runs.json").read_text())
    assert kept == {f"mlflow, rank 1, file://localhost{store}": found["run_id"]}


def test_many_quick_reports_all_reach_mlflow(tmp_path, run_script):
    steps = "steps=[(i, i / 2) for i in range(1, 1301)]"
    found = run_script(mlflow_script(drive=steps), tmp_path / "run_001")
    assert found["history"]["loss"] == [[step, step / 2] for step in range(1, 1301)]


WANDB = """
from paceline.callbacks import WandbLoggerCallback
before = dict(os.environ)
drive(WandbLoggerCallback(project="p", mode="offline", {arguments}), config={{"lr": 0.1}}, {drive})
import wandb
wandb.teardown()
print(json.dumps({{"added": sorted(set(os.environ) - set(before))}}))
"""


def wandb_records(run_dir):
    """The records of the one offline run below `run_dir`."""
    (path,) = wandb_files(run_dir)
    return read_wandb_file(path)


def wandb_files(run_dir):
    return sorted((run_dir / "wandb").glob("offline-run-*/run-*.wandb"))


def wandb_history(records):
    rows = []
    for record in records:
        if record.WhichOneof("record_type") == "history":
            items = {
                (item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item
            }
            rows.append({key: value for key, value in items.items() if not key.startswith("_")})
    return rows


def test_wandb_offline(tmp_path, run_script):
    run_dir = tmp_path / "run_001"
    found = run_script(WANDB.format(arguments='config={"extra": 1}', drive=""), run_dir)
    assert "WANDB_ERROR_REPORTING" not in found["added"], "the user's environment is not changed"
    records = wandb_records(run_dir)
    assert wandb_history(records) == [
        {"loss": 0.5, "nested/a": 1, "training_iteration": 1},
        {"loss": 0.25, "nested/a": 2, "training_iteration": 2},
    ]
    (run,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert (run.project, run.display_name) == ("p", "run_001")
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert (config["lr"], config["extra"]) == (0.1, 1)
    assert exit_codes(records) == [0]


def test_wandb_is_told_of_a_stop(tmp_path, run_script):
    run_script(WANDB.format(arguments="worker_to_log=1", drive='status="STOPPED"'), tmp_path / "run_001")
    records = wandb_records(tmp_path / "run_001")
    assert exit_codes(records) == [255]
    assert [row["loss"] for row in wandb_history(records)] == [9, 9]


def test_wandb_keeps_all_results_when_a_restart_repeats_steps(tmp_path, run_script):
    run_script(WANDB.format(arguments="", drive="steps=[(1, 4), (2, 3), (1, 2), (2, 1)]"), tmp_path / "run_001")
    rows = wandb_history(wandb_records(tmp_path / "run_001"))
    assert [(row["training_iteration"], row["loss"]) for row in rows] == [(1, 4), (2, 3), (1, 2), (2, 1)]


def test_wandb_goes_on_with_the_run_of_an_earlier_driver(tmp_path, run_script, run_later):
    run_dir = tmp_path / "run_001"
    run_script(WANDB.format(arguments="", drive='status="FAILED"'), run_dir)
    resumed = WANDB.format(arguments="resume='never'", drive="is_resumed=True, steps=[(2, 7), (3, 8)]")
    run_later(resumed, run_dir)
    first, second = (read_wandb_file(path) for path in wandb_files(run_dir))
    assert [row["loss"] for row in wandb_history(first)] == [0.5, 0.25]
    assert [(row["training_iteration"], row["loss"]) for row in wandb_history(second)] == [(2, 7), (3, 8)]
    ids = [record.run.run_id for record in first + second if record.WhichOneof("record_type") == "run"]
    assert len(ids) == 2
    assert len(set(ids)) == 1
    assert (exit_codes(first), exit_codes(second)) == ([1], [0])


def test_wandb_leaves_out_steps_without_the_worker(tmp_path, run_script):
    drive = "steps=[(1, 1, 2), (2, 2, 1), (3, 3, 2)]"
    run_script(WANDB.format(arguments="worker_to_log=1", drive=drive), tmp_path / "run_001")
    assert [row["training_iteration"] for row in wandb_history(wandb_records(tmp_path / "run_001"))] == [1, 3]


def exit_codes(records):
    return [record.exit.exit_code for record in records if record.WhichOneof("record_type") == "exit"]


def test_progress_in_a_notebook(tmp_path):
    source = f"""
        import sys
        sys.path.insert(0, {str(SOURCE_DIR)!r})
        from paceline.callbacks import default_progress
        callback = default_progress()
        callback.start_training("/results/sgd/run_001", {{}}, run_id="run_001", num_workers=2, world_size=2)
        for step in range(1, 1001):
            callback.handle_result([{{"loss": 1 / step, "_training_iteration": step}}, {{}}])
        callback.finish_training(status="SUCCEEDED", exception=None)
    """
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(textwrap.dedent(source))])
    # The switch that keeps displays out of other tests must not be on here.
    variables = {name: value for name, value in os.environ.items() if name != "PACELINE_PROGRESS"}
    NotebookClient(notebook, kernel_name="python3", timeout=120).execute(cwd=str(tmp_path), env=variables)
    outputs = notebook.cells[0].outputs
    assert [output.output_type for output in outputs] == ["display_data"], "one output, updated in place"
    text = outputs[0].data["text/plain"]
    assert text.startswith("✓ SUCCEEDED · 1,000 steps in ")
    summary, metrics = text.strip().splitlines()
    assert summary.strip().endswith("→ /results/sgd/run_001")
    assert metrics.split() == ["loss", "0.001"]
    assert "SUCCEEDED" in outputs[0].data["text/html"]
