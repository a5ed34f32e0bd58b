"""`paceline train`, as somebody uses it who has never seen it."""

import gc
import json
import sys
from pathlib import Path

import pytest

import paceline
from paceline.errors import ConfigError
from paceline.experiment.new_project import make_project, template

EXAMPLE = Path(__file__).parents[2] / "examples/experiment"


def test_new_project_runs_once(work_in, call, tmp_path, monkeypatch):
    """In this process; as a program of its own it is run by the proof of experiments."""
    folder, results = tmp_path / "digits", tmp_path / "results"
    words = ["train", "run", "num_epochs=1", "start_workers=0"]
    monkeypatch.chdir(tmp_path)
    assert call("new", "digits")[0] == f"{folder}\n"  # as the seed of this command line has it
    work_in(folder, results)
    shown, told = call(*words, "--json")
    path = str(results / "digits/run_001")
    assert json.loads(shown)["path"] == path
    assert "epoch 1/1" in told
    shown, told = call(*words, "--json")
    assert json.loads(shown)["path"] == path
    assert "has been run with this code: digits/run_001, SUCCEEDED." in told
    assert call(*words)[0] == f"{path}\n"
    shown, _ = call(*words, "--force")
    assert shown.splitlines()[-1] == str(results / "digits/run_002")
    assert "epoch 1/1" in shown


@pytest.fixture
def project(tmp_path, work_in):
    """A new project, in which commands run in this process; each test starts with its modules not imported."""
    make_project(tmp_path / "digits")
    work_in(tmp_path / "digits", tmp_path / "results")
    return tmp_path / "digits"


def test_bind_keeps_what_was_edited_and_says_what_is_new(project, call):
    call("train", "bind", "--check")
    conf = project / "src/conf.yaml"
    before = conf.read_text()
    conf.write_text(before.replace("    amsgrad: false\n", "").replace("lr: 0.003", "lr: 0.5  # mine"))
    assert call("train", "bind", "--check", code=1)[1] == "missing: optimizers.adam.amsgrad\n"
    assert "+    amsgrad: false" in call("train", "bind", "--diff")[0].splitlines()
    shown, told = call("train", "bind")
    assert shown == f"{conf}\n"
    assert "edited: optimizers.adam.lr: 0.5 (code: 0.003)" in told
    assert conf.read_text() == before.replace("lr: 0.003", "lr: 0.5  # mine")
    call("train", "bind", "--reset")
    assert conf.read_text() == before, "and the name of its runs stays"
    conf.write_text("a: [")
    assert "they are called 'digits' from now on" in call("train", "bind", "--reset")[1]
    assert conf.read_text() == before


@pytest.mark.parametrize(("words", "code"), [(["bind", "--check"], 0), (["run", "cfg.num_epochs=many"], 2)])
def test_experiment_is_imported_without_collecting_garbage(words, code, project, call):
    with (project / "src/tools.py").open("a") as file:
        file.write("\nimport gc\n\nIS_COLLECTED = gc.isenabled()\n")
    call("train", *words, code=code)
    assert not sys.modules["src.tools"].IS_COLLECTED
    assert gc.isenabled()


def test_sweep_is_a_run_for_each_combination(project, call):
    words = ["train", "run", "-m", "num_epochs=1", "start_workers=0", "train.batch_size=500", "lr=1e-2,1e-3"]
    shown, told = call(*words)
    paths = [line for line in shown.splitlines() if line.startswith("/")]
    runs = [paceline.load_run(path) for path in paths]
    assert [run.config["optimizers"]["adam"]["lr"] for run in runs] == [1e-2, 1e-3]
    assert [run.request["parent"]["number"] for run in runs] == [1, 2]
    [sweep] = {run.request["parent"]["sweep"] for run in runs}
    assert f"`paceline xp ls --filter config.sweep={sweep}`" in told
    listed, _ = call("xp", "ls", "-q", "--filter", f"config.sweep={sweep}")
    assert {*listed.split()} == {"digits/run_001", "digits/run_002"}


def test_run_that_failed_is_gone_on_with(project, call):
    with (project / "src/experiment.py").open("a") as file:
        file.write(
            "\n\nclass Interrupted(Experiment):\n"
            "    def validate(self, dataloader, epoch):\n"
            "        if epoch == 1 and Path('broken').exists():\n"
            "            raise KeyboardInterrupt if Path('broken').read_text() else RuntimeError('as asked')\n"
            "        return super().validate(dataloader, epoch)\n\n\n"
            "Experiment = Interrupted\n"
        )
    text = (project / "src/experiment.py").read_text()
    (project / "src/experiment.py").write_text(
        text.replace("import torch\n", "from pathlib import Path\n\nimport torch\n", 1)
    )
    (project / "broken").touch()
    words = ["train", "run", "num_epochs=2", "start_workers=0", "train.batch_size=500"]
    told = call(*words, code=1)[1]
    assert "as asked" in told
    assert "digits/run_001: FAILED. `paceline xp show digits/run_001` tells more." in told
    assert "--resume goes on with that run." in call(*words, code=2)[1]
    (project / "broken").write_text("by hand")
    told = call(*words, "--resume", code=130)[1]
    assert "digits/run_001: STOPPED. `paceline xp resume digits/run_001` goes on with it." in told
    (project / "broken").unlink()
    path = call(*words, "--resume")[0].split()[-1]
    metrics = paceline.load_run(path).all_metrics
    assert path.endswith("run_001")
    assert metrics.query("epoch == 0")["attempt"].unique().tolist() == [0], "what was done is not done again"
    assert metrics.query("batch.isna()")["epoch"].tolist() == [0, 1]
    assert "SUCCEEDED" in call(*words, "--resume")[1]


def test_batches_are_prepared_once(project, call, tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_STORAGE", str(tmp_path))
    words = ["train", "run", "num_epochs=1", "start_workers=0", "cfg.seed=0", "--force"]
    mapped, told = call(*words, "--prepare-batches")
    assert told.count(" is prepared (") == 3
    again, told = call(*words, "--prepare-batches")
    assert told.count(" is prepared already: ") == 3
    plain, told = call(*words)
    assert " is prepared" not in told
    columns = ["epoch", "batch", "loss1", "mae"]
    frames = [paceline.load_run(one.split()[-1]).metrics[columns] for one in (mapped, again, plain)]
    assert frames[0].equals(frames[1])
    assert frames[0].equals(frames[2])


def test_other_code_is_another_run(project, call):
    words = ["train", "run", "num_epochs=1", "start_workers=0", "train.batch_size=500"]
    first, told = call(*words)
    assert "to resume" not in told
    assert call(*words)[0].split()[-1] == first.split()[-1]
    with (project / "src/model.py").open("a") as file:
        file.write("# another line\n")
    shown, told = call(*words, "--resume")
    assert shown.split()[-1].endswith("run_002")
    assert told.count(" and code is there to resume: one begins.\n") == 1
    assert "to resume" not in call(*words, "--resume")[1]


def test_failed_run_is_told_and_can_be_resumed(project, call):
    """Of the workers' output nothing is among the answers of --json."""
    file = project / "src/experiment.py"
    file.write_text(
        file.read_text()
        .replace(
            "    def train_steps(",
            "    def on_bad_day(self):\n"
            "        import os\n\n"
            '        print("a line of the worker")\n'
            '        if not os.path.exists("mended"):\n'
            '            raise ValueError("upside down")\n\n'
            "    def train_steps(",
        )
        .replace("        self.reset_all_metrics_and_losses()\n        for", "        self.on_bad_day()\n        for")
    )
    words = ["train", "run", "num_epochs=1", "start_workers=0", "train.batch_size=500", "--json"]
    shown, told = call(*words, code=1)
    assert (json.loads(shown)["run"], json.loads(shown)["state"]) == ("digits/run_001", "FAILED")
    assert "upside down" in told
    shown, told = call(*words, code=2)
    assert json.loads(shown)["state"] == "FAILED"
    assert "has been run with this code: digits/run_001, FAILED.\n--force runs it anew.\n--resume goes on" in told
    (project / "mended").touch()
    shown, told = call(*words, "--resume")
    assert (json.loads(shown)["run"], json.loads(shown)["state"]) == ("digits/run_001", "SUCCEEDED")
    assert "a line of the worker" in told


def test_new_tells_in_json(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown, _ = call("train", "new", "digits", "--json")
    assert json.loads(shown) == {"name": "digits", "path": str(tmp_path / "digits")}


def test_what_cannot_run_is_said_before_anything_starts(project, call, forget, tmp_path, monkeypatch):
    _, told = call("train", "run", "optimizers.adam.lr=high", "models.dnn.fc._target_=os.system", code=2)
    assert "2 problems" in told
    monkeypatch.chdir(tmp_path)
    forget()
    sys.path.remove(str(project))
    assert "Go to the folder of an experiment" in call("train", "run", code=2)[1]
    assert not (tmp_path / "results").exists()


def test_template_validates_without_dropout(project):
    from src.experiment import Experiment

    class Quiet(Experiment):
        def save_metrics_and_losses(self, **_):
            """There is no run to report to."""

    experiment = Quiet.init_module(project / "src/conf.yaml")
    experiment.validate([], epoch=0)
    assert not experiment.models.dnn.training
    experiment.train_steps([], epoch=1)
    assert experiment.models.dnn.training


def test_template_is_the_example():
    files = template()
    assert set(files) == {
        str(path.relative_to(EXAMPLE))
        for path in EXAMPLE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    for name, text in files.items():
        assert text == (EXAMPLE / name).read_text(), name


def test_project_goes_only_where_nothing_is(tmp_path):
    (tmp_path / "there").mkdir()
    assert make_project(tmp_path / "there") == tmp_path / "there"
    with pytest.raises(ConfigError, match="is there already"):
        make_project(tmp_path / "there")
    with pytest.raises(ConfigError, match="cannot be the name"):
        make_project(tmp_path / "a b")
