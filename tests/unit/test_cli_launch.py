"""What goes to a cluster with a launch, and what is refused before anything does; without a cluster."""

import io
import json
import os
import shlex
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import paceline
from paceline.cli.announcing import Announcement, find_announced
from paceline.cli.app import build
from paceline.cli.cluster_runs import ClusterRun, named
from paceline.cli.launching import Launch, follow, variables_for_job
from paceline.cli.line_stream import LineStream
from paceline.cli.parcel import files_to_send, pack
from paceline.cli.ray_cluster import Job
from paceline.errors import ConfigError, ResourcesError
from paceline.experiment.new_project import make_project, template
from paceline.launch import data_job
from paceline.launch.data_job import Alone, DataJob, find_job
from paceline.runs import RunFolder
from paceline.runs.environment import JOB_VARIABLE

NOBODY = ["--address", "http://127.0.0.1:1"]
STATES = ("PENDING", "RUNNING", "STOPPED", "FAILED")


@pytest.fixture
def project(tmp_path):
    """A folder with code, and with much that is none."""
    for name in ("src/model.py", "data/big.bin", ".env", ".venv/x.py", "src/__pycache__/m.pyc", "results/a/run.json"):
        path = tmp_path / "project" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(2000) if name == "data/big.bin" else b"x")
    return tmp_path / "project"


def invoke(*words, code=0):
    done = CliRunner().invoke(build(), [str(word) for word in words])
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


def test_code_of_a_repository_inside_goes_along(project):
    """A submodule, or a clone that is not even one: git itself names its folder only."""
    for inner in ("libs/ours", "cloned"):
        (project / inner).mkdir(parents=True)
        for name in ("inner.py", "inner.log", ".gitignore"):
            (project / inner / name).write_text("*.log\n")
        as_somebody = ["-c", "user.name=x", "-c", "user.email=x@x"]
        for words in (["init", "--quiet"], ["add", "."], [*as_somebody, "commit", "--quiet", "-m", "inner"]):
            subprocess.run(["git", "-C", project / inner, *words], check=True)
    subprocess.run(["git", "init", "--quiet", str(project)], check=True)
    (project / ".gitignore").write_text("data/\nresults/\n")
    subprocess.run(["git", "-C", project, "-c", "advice.addEmbeddedRepo=false", "add", "libs/ours"], check=True)
    assert files_to_send(project) == ["cloned/inner.py", "libs/ours/inner.py", "src/model.py"]


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
    for words in ([], ["--resume"]):
        told = invoke("train", "launch", *words, code=2).stderr
        assert "has been launched with this code: digits/paceline_1, PENDING.\n--force" in told


def test_run_has_ended_when_its_folder_says_so(tmp_path, monkeypatch):
    """Its job still runs, for a moment: who resumes it then was told that it goes on."""
    monkeypatch.setenv(JOB_VARIABLE, "paceline_1")
    path = tmp_path / "digits/run_001"

    def train():
        with paceline.record_run(logdir=path.parent):
            assert state_of("paceline_1", path) == "RUNNING"
            raise KeyError("lr")

    with pytest.raises(KeyError, match="lr"):
        train()
    assert state_of("paceline_1", path) == "FAILED"
    assert state_of("of_another_machine", path) == "RUNNING"


def test_run_of_a_job_that_is_gone_on_with_here_is_still_that_run(tmp_path, monkeypatch):
    monkeypatch.setenv(JOB_VARIABLE, "paceline_1")
    (folder := RunFolder.create(tmp_path / "digits")).record_environment()
    folder.close()
    monkeypatch.delenv(JOB_VARIABLE)
    (again := RunFolder.reopen(folder.path)).record_environment()
    again.close()
    job = Job("paceline_1", "STOPPED", "", None, "")
    assert ClusterRun(None, job, folder.path.name, str(folder.path)).is_here, "or it would be listed twice"


def state_of(job, path):
    return ClusterRun(None, Job(job, "RUNNING", "", None, ""), path.name, str(path)).state


def test_job_is_asked_what_was_asked_here(digits, monkeypatch):
    from paceline.cli import cluster_runs, ray_cluster

    assert cluster_runs.Cluster is ray_cluster.Cluster
    sent = []

    class Cluster:
        """One that takes whatever comes, and begins it at once."""

        url = "http://head:8265"

        def __init__(self, address):
            pass

        def jobs(self):
            return []

        def submit(self, submission):
            sent.append((shlex.split(submission.command), zipfile.ZipFile(submission.archive).namelist()))

        def beginnings(self, ids, is_enough, within_s):
            lines = [f"paceline: This is digits/run_00{n}, in /r/digits/run_00{n}\n" for n, _ in enumerate(ids, 1)]
            return dict(zip(ids, lines, strict=True))

        def job(self, id):
            return ray_cluster.Job(id, "RUNNING", "", None, "")

    monkeypatch.setattr(ray_cluster, "Cluster", Cluster)
    swept = invoke("train", "launch", "-m", "lr=1e-2,1e-3", "--prepare-batches", "--conf", "src/conf.yaml")
    assert swept.stdout == "digits/run_001\ndigits/run_002\n"
    for number, (words, names) in enumerate(sent, 1):
        begin, parent, end = words[:-3], json.loads(words[-3]), words[-2:]
        asked = "exec python -m paceline train run --engine ray --force --conf src/conf.yaml --prepare-batches --parent"
        assert (begin, end) == (asked.split(), ["--", f"lr=1e-{number + 1}"])
        assert (parent["number"], parent["of"]) == (number, 2)
        assert "src/experiment.py" in names
    sent.clear()
    invoke("train", "launch", "--resume")
    assert sent[0][0][-6:] == ["train", "run", "--engine", "ray", "--resume", "--"]
    for words, num_jobs in ((["lr=1e-2,0.01,1"], 2), (["lr=1e-2,0.01,1", "--force"], 3)):
        sent.clear()
        told = invoke("train", "launch", "-m", *words).stderr
        assert len(sent) == num_jobs
        assert ("lr=0.01: another run of this sweep has the same configuration" in told) == (num_jobs == 2)


def test_connection_that_ends_before_the_job(capsys):
    running = SimpleNamespace(is_final=False, state="RUNNING")
    line = "paceline: This is digits/run_001, in /x\n"
    cluster = SimpleNamespace(url="http://head", follow=lambda id, tell: tell(line), job=lambda id: running)
    with pytest.raises(ResourcesError, match=r"ended the connection, and the job is RUNNING.*digits/run_001, may well"):
        follow(cluster, "paceline_1", Launch("digits", [], {}), "http://head", as_json=False)
    assert capsys.readouterr().out == line


@pytest.mark.parametrize(("state", "code"), [("SUCCEEDED", 0), ("FAILED", 1), ("STOPPED", 1)])
def test_followed_job_ends_with_the_code_of_its_run(capsys, state, code):
    job = Job("paceline_1", state, "", None, "")
    line = "paceline: This is digits/run_001, in /x\n"
    cluster = SimpleNamespace(url="http://head", follow=lambda id, tell: tell(line), job=lambda id: job)
    assert follow(cluster, "paceline_1", Launch("digits", [], {}), "http://head", as_json=False) == code
    assert capsys.readouterr().err.endswith(f"digits/run_001: {state}\n")


def test_followed_run_was_stopped_and_its_job_has_failed(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(JOB_VARIABLE, "paceline_1")
    with RunFolder.create(tmp_path / "digits") as folder:
        folder.record_environment()
        folder.set_state("STOPPED")
    line = f"paceline: This is digits/run_001, in {folder.path}\n"
    job = Job("paceline_1", "FAILED", "", None, "")
    cluster = SimpleNamespace(url="http://head", follow=lambda id, tell: tell(line), job=lambda id: job)
    assert follow(cluster, "paceline_1", Launch("digits", [], {}), "http://head", as_json=True) == 1
    told = capsys.readouterr()
    assert json.loads(told.out)["state"] == "STOPPED"
    assert told.err.endswith("digits/run_001: STOPPED\n")


class EndedJob:
    """A cluster whose only job, which had not begun its run when the user named it, has failed by now. Its run was
    stopped: from its own machine, of which Ray does not know."""

    url = "http://head:8265"

    def __init__(self, path, state="FAILED"):
        self.text = f"paceline: This is digits/run_001, in {path}\n"
        self.ended = Job("paceline_1", state, "", None, "Job failed", about={"name": "digits"})
        self.as_picked = ClusterRun(self, replace(self.ended, state="PENDING"), "paceline_1", None)

    def follow(self, id, tell):
        tell(self.text)

    def beginnings(self, ids, is_enough, within_s):
        return dict.fromkeys(ids, self.text)

    def job(self, id):
        return self.ended

    def await_end(self, id, deadline):
        return self.ended

    def stop(self, id):
        pass


@pytest.mark.parametrize("words", [["logs", "-f"], ["wait"], ["stop"]])
def test_end_that_is_told_is_that_of_the_run(tmp_path, monkeypatch, words):
    monkeypatch.setenv(JOB_VARIABLE, "paceline_1")
    with RunFolder.create(tmp_path / "digits") as folder:
        folder.record_environment()
        folder.set_state("STOPPED")
    code = {"wait": 1}.get(words[0], 0)
    for path, told in ((folder.path, "STOPPED"), ("/of/another/machine/run_001", "FAILED")):
        cluster = EndedJob(path)
        for module in ("xp_logs", "xp_control"):
            picked = [cluster.as_picked]
            monkeypatch.setattr(f"paceline.cli.{module}.pick_anywhere", lambda *words, picked=picked, **named: picked)
        last = invoke("xp", *words, "digits", code=code).stderr.splitlines()[-1]
        assert last.startswith("digits/run_001: ")
        assert told in last
        assert ("Job failed" in last) == (told == "FAILED" and words != ["stop"])


def test_run_that_several_jobs_have_gone_on_with():
    jobs = [Job(f"paceline_{n}", state, "", None, "", about={"name": "digits"}) for n, state in enumerate(STATES)]
    texts = {job.id: "paceline: This is digits/run_001, in /r/digits/run_001\n" for job in jobs[1:]}
    cluster = SimpleNamespace(beginnings=lambda ids, is_enough, within_s: texts)
    assert [(run.name, run.job.id) for run in named(cluster, jobs)] == [
        ("digits/paceline_0", "paceline_0"),
        ("digits/run_001", "paceline_1"),
    ]


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


@pytest.mark.parametrize(
    "text",
    ["tool = 1", "[tool]\npaceline = 3", "project = 3\n[tool.paceline]\ndata_job = 'main.py'\n", None],
    ids=["tool", "paceline", "project", "pipe"],
)
def test_hostile_project_file_is_refused_in_words(tmp_path, text):
    (tmp_path / "main.py").touch()
    file = tmp_path / "pyproject.toml"
    os.mkfifo(file) if text is None else file.write_text(text)
    with pytest.raises(ConfigError, match=r"pyproject\.toml"):
        find_job(tmp_path)
    if text is None or text.startswith(("tool", "[tool]")):
        with pytest.raises(ConfigError, match=r"pyproject\.toml"):
            pack(tmp_path, tmp_path / "project.zip")


def test_with_json_stdout_has_the_answer_and_nothing_else(tmp_path, monkeypatch):
    def run_job(job, args, storage, callbacks):
        assert storage == tmp_path
        callbacks[0].start_training(logdir=str(tmp_path / "circles/run_001"), config={})
        print("[rank 0] what the job prints")
        return 0

    make_project(tmp_path / "circles", "data_template")
    monkeypatch.chdir(tmp_path / "circles")
    monkeypatch.setattr("paceline.launch.data_job.run_job", run_job)
    monkeypatch.delenv("PACELINE_STORAGE", raising=False)
    done = invoke("data", "run", "--root", tmp_path, "--json")
    assert json.loads(done.stdout) == {"run": "circles/run_001", "path": str(tmp_path / "circles/run_001")}
    assert "[rank 0] what the job prints" in done.stderr
    assert "[rank 0] what the job prints" in invoke("data", "run", "--root", tmp_path).stdout


def where_the_storage_is():
    paceline.report(storage_is=Path(os.environ["PACELINE_STORAGE"]).name)
    raise KeyError("half way")


def test_storage_of_a_data_job_is_that_of_its_run(tmp_path, monkeypatch):
    """Who retries or resumes it has another one, or none: what it writes must not come there."""
    monkeypatch.setenv("PACELINE_RESULTS", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("PACELINE_STORAGE", raising=False)
    backend = Alone(storage="/mnt/shared")
    with (
        paceline.Trainer(backend, num_workers=0, logdir=tmp_path / "circles") as trainer,
        pytest.raises(KeyError, match="half way"),
    ):
        trainer.run(where_the_storage_is)
    assert "PACELINE_STORAGE" not in os.environ
    monkeypatch.setenv("PACELINE_STORAGE", "/mnt/other")
    for verb, run in (("retry", "run_002"), ("resume", "run_001")):
        assert "half way" in invoke("xp", verb, "circles", "1", code=1).stderr
        assert os.environ["PACELINE_STORAGE"] == "/mnt/other"
        lines = (tmp_path / "circles" / run / "metrics.jsonl").read_text().splitlines()
        assert {json.loads(line)["ranks"][0]["storage_is"] for line in lines} == {"shared"}


def test_data_job_whose_name_is_that_of_a_home(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_RESULTS", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    Path("main.py").touch()
    asked = []
    monkeypatch.setattr(data_job, "run_to_exit_code", lambda program, launch, **given: asked.append(launch) or 0)
    data_job.run_job(DataJob("~", "main.py"), [], tmp_path)
    assert [launch.logdir for launch in asked] == [str(tmp_path / "~")]


def test_an_experiment_is_no_data_job(digits):
    assert "its pyproject.toml names none" in invoke("data", "run", code=2).stderr


def test_template_of_data_jobs_passes_its_own_tests(tmp_path):
    make_project(tmp_path / "circles", "data_template")
    assert set(template("data_template")) == {"README.md", "main.py", "pyproject.toml", "tests/test_main.py"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path / "circles")]
    done = subprocess.run(command, cwd=tmp_path / "circles", capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
