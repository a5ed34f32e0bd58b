"""What goes to a cluster with a launch, and what is refused before anything does; without a cluster."""

import io
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli.announcing import Announcement, find_announced
from paceline.cli.app import app
from paceline.cli.launching import variables_for_job
from paceline.cli.line_stream import LineStream
from paceline.cli.parcel import files_to_send, pack
from paceline.errors import ConfigError
from paceline.experiment.new_project import make_project, template
from paceline.launch.data_job import DataJob, find_job

NOBODY = ["--address", "http://127.0.0.1:1"]


@pytest.fixture
def project(tmp_path):
    """A folder with code, and with much that is none."""
    for name in ("src/model.py", "data/big.bin", ".env", ".venv/x.py", "src/__pycache__/m.pyc", "results/a/run.json"):
        path = tmp_path / "project" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(2000) if name == "data/big.bin" else b"x")
    return tmp_path / "project"


def invoke(*words, code=0):
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == code, f"{done.output} {done.exception!r}"
    return done


def test_code_goes_and_nothing_else(project):
    assert files_to_send(project, outside=[project / "results"]) == ["data/big.bin", "src/model.py"]
    assert files_to_send(project, ["data", "results/*"]) == ["src/model.py"]
    assert files_to_send(project, ["*.bin", "*.json"]) == ["src/model.py"]
    (project / "out").symlink_to("/etc")
    assert "out/passwd" not in files_to_send(project)


def test_what_git_ignores_stays(project):
    subprocess.run(["git", "init", "--quiet", str(project)], check=True)
    (project / ".gitignore").write_text("data/\nresults/\n")
    assert files_to_send(project) == ["src/model.py"]
    (project / "new.py").write_text("")
    assert files_to_send(project) == ["new.py", "src/model.py"], "what is not added yet is code too"


def test_same_files_are_the_same_parcel(project, tmp_path):
    first, again = tmp_path / "1.zip", tmp_path / "2.zip"
    pack(project, first)
    os.utime(project / "src/model.py", (1, 1))
    pack(project, again)
    assert first.read_bytes() == again.read_bytes()
    assert zipfile.ZipFile(first).read("src/model.py") == b"x"


def test_too_much_names_the_files(project, tmp_path):
    with pytest.raises(ConfigError) as caught:
        pack(project, tmp_path / "1.zip", most_bytes=1000)
    assert "0.0 MB  data/big.bin" in str(caught.value)
    assert 'exclude = ["data"]' in str(caught.value)
    (project / "pyproject.toml").write_text('[tool.paceline]\nexclude = ["data"]\n')
    pack(project, tmp_path / "2.zip", most_bytes=1000)
    (project / "pyproject.toml").write_text("[tool.paceline]\nexclude = 3\n")
    with pytest.raises(ConfigError, match="expected a list of patterns"):
        pack(project, tmp_path / "3.zip")


def test_file_that_cannot_be_read_is_named(project, tmp_path):
    (project / "loop.py").symlink_to("loop.py")
    (project / "gone.py").symlink_to("nothing")
    assert pack(project, tmp_path / "1.zip", [project / "results"]) == ["data/big.bin", "src/model.py"]
    with pytest.raises(ConfigError, match=r"cannot be sent to a cluster: .*nowhere"):
        pack(project, tmp_path / "nowhere/1.zip")


def test_folders_go_along_as_whole_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    environ = {"PACELINE_RESULTS": "here", "PACELINE_STORAGE": "", "SECRET": "1", "RAY_AUTH_TOKEN": "2"}
    told = variables_for_job(tmp_path, environ, python="/opt/env/bin/python")
    assert told == {
        "RAY_JOB_STOP_WAIT_TIME_S": "60",
        "PACELINE_RESULTS": str(tmp_path / "here"),
        "PATH": "/opt/env/bin:${PATH}",
    }
    assert "PATH" not in variables_for_job(tmp_path, {}, python="/usr/bin/python3")


def test_run_is_known_by_what_it_says():
    said = []
    Announcement(said.append).start_training("/results/my exp/run_007", {}, run_id="run_007")
    text = "\n".join(["INFO connected", *said, "paceline: This is other/run_001, in /x"])
    assert find_announced(text) == ("my exp", "run_007", "/results/my exp/run_007")
    assert find_announced("[rank 0] paceline: This is x/run_001, in /x") is None


def test_output_comes_by_whole_and_clean_lines():
    file = io.StringIO()
    stream = LineStream(file, lambda line: "no" not in line, num_skipped=4)
    for piece in ("old", "\none", " two\nno\nth", "ree\x1b[2J"):
        stream.feed(piece)
    assert file.getvalue() == "one two\n"
    stream.close()
    assert file.getvalue() == "one two\nthree\\x1b[2J\n"
    assert stream.beginning.startswith("old\none two")


@pytest.fixture
def digits(tmp_path, monkeypatch):
    make_project(tmp_path / "digits")
    monkeypatch.chdir(tmp_path / "digits")
    monkeypatch.syspath_prepend(tmp_path / "digits")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    yield tmp_path / "digits"
    for name in [name for name in sys.modules if name == "src" or name.startswith("src.")]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["cfg.num_epoch=1"], "Did you mean 'num_epochs'"),
        (["--follow", "-m", "lr=1,2"], "one run can be followed"),
        (["--conf", "../conf.yaml"], "only this folder goes to the cluster"),
        (["--address", "ftp://x"], "expected http://HOST:8265"),
        (NOBODY, "There is no Ray cluster at http://127.0.0.1:1"),
    ],
)
def test_launch_is_refused_before_anything_is_sent(digits, words, told):
    assert told in invoke("train", "launch", *words, code=2).stderr
    assert "Usage" in invoke("train", "lauch", "--help").stdout


def test_what_is_being_run_is_not_launched_again(digits, monkeypatch):
    from paceline.cli import cluster_runs, ray_cluster
    from paceline.cli.train_run import plans_of

    assert cluster_runs.Cluster is ray_cluster.Cluster  # it is loaded before the other one takes its place

    [(_, plan, _)] = plans_of(None, [], False)
    about = {"name": "digits", "config": plan.config_hash, "code": plan.code_hash}

    class Cluster:
        """One that has a job of this configuration."""

        def __init__(self, address):
            pass

        def jobs(self):
            return [ray_cluster.Job("paceline_1", "PENDING", "", None, "", about=about)]

    monkeypatch.setattr(ray_cluster, "Cluster", Cluster)
    told = invoke("train", "launch", code=2).stderr
    assert "has been launched with this code: digits/paceline_1, PENDING.\n--force" in told


def test_data_job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PACELINE_STORAGE", str(tmp_path / "storage"))
    for verb in ("run", "launch"):
        assert "it has no pyproject.toml. Go to the folder of a data job" in invoke("data", verb, code=2).stderr
    assert json.loads(invoke("data", "new", "circles", "--json").stdout) == {"path": str(tmp_path / "circles")}
    assert find_job(tmp_path / "circles") == DataJob("circles", "main.py")
    assert "is there already" in invoke("data", "new", "circles", code=2).stderr
    monkeypatch.chdir(tmp_path / "circles")
    assert "is no folder: expected the root" in invoke("data", "run", code=2).stderr
    assert "There is no Ray cluster" in invoke("data", "launch", *NOBODY, code=2).stderr
    monkeypatch.delenv("PACELINE_STORAGE")
    for verb in ("run", "launch"):
        assert "Which storage" in invoke("data", verb, code=2).stderr
    Path("main.py").unlink()
    assert "names the script 'main.py', which is not there" in invoke("data", "run", code=2).stderr


def test_an_experiment_is_no_data_job(digits):
    assert "its pyproject.toml names none" in invoke("data", "run", code=2).stderr


def test_template_of_data_jobs_passes_its_own_tests(tmp_path):
    make_project(tmp_path / "circles", "data_template")
    assert set(template("data_template")) == {"README.md", "main.py", "pyproject.toml", "tests/test_main.py"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path / "circles")]
    done = subprocess.run(command, cwd=tmp_path / "circles", capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
