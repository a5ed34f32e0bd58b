"""What stands in the way of `paceline train`: damaged runs, full disks, others who do the same at the same time."""

import fcntl
import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
import typed_experiment
from typer.testing import CliRunner

import paceline
from paceline.cli.app import build
from paceline.cli.train_run import plans_of
from paceline.errors import ConfigError
from paceline.experiment import binding, fresh, run_experiment, running, same_runs, schema_of
from paceline.experiment.new_project import make_project
from paceline.experiment.project import read_conf, write_conf
from paceline.project_file import can_name_runs
from paceline.runs.driver_lock import alone_in
from paceline.runs.kept_call import load_call


def run(name, *overrides, experiment=typed_experiment.Exact):
    changes = [f"cfg.name={name}", "cfg.start_workers=0", "cfg.num_epochs=1", *overrides]
    return run_experiment(experiment, overrides=changes)


def test_damaged_run_beside_it_keeps_nobody_from_training(tmp_path):
    trained = run("beside")
    (trained.path.parent / "run_900").mkdir()
    os.mkfifo(trained.path.parent / "run_900/run.json")
    assert [one.path for one in same_runs(trained.config_hash, trained.path.parent)] == [trained.path]


def test_constructor_that_exits_is_no_run_that_is_done(monkeypatch):
    monkeypatch.setattr(typed_experiment.Models, "__init__", lambda self, **given: sys.exit(0))
    with pytest.raises(ConfigError, match=r"a constructor called sys.exit\(0\)"):
        run("exits")


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project whose experiment is the tests' own."""
    (tmp_path / "pyproject.toml").write_text('[tool.paceline]\nexperiment = "typed_experiment:Exact"\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PACELINE_RESULTS", str(tmp_path / "results"))
    monkeypatch.setattr("paceline.experiment.project.project_of", lambda experiment: tmp_path)
    return tmp_path


def call(*words, code=0):
    done = CliRunner().invoke(build("train"), ["train", *words])
    assert done.exit_code == code, done.output
    return done.stdout, done.stderr


SMALL = ["cfg.start_workers=0", "cfg.num_epochs=1"]


def test_disk_that_refuses_the_configuration_does_not_stop_the_run(project, monkeypatch, caplog):
    def refuse(path, data, durable=True):
        if str(path).endswith("conf.yaml"):
            raise OSError(28, "No space left on device")
        real(path, data, durable)

    import paceline.runs.folder as folder

    real = folder.write_atomic
    monkeypatch.setattr(folder, "write_atomic", refuse)
    path = call("run", *SMALL)[0].split()[-1]
    assert paceline.load_run(path).status.state == "SUCCEEDED"
    assert "conf.yaml could not be written" in caplog.text


def test_error_of_a_constructor_is_told_whole(project):
    _, told = call("run", *SMALL, "models.net.block.dropout=2.0", code=1)
    assert "ValueError: dropout probability has to be between 0 and 1" in told
    assert "It was raised by Block, which is models.net.block of the configuration." in told


def test_what_fails_in_the_run_is_no_refusal(project):
    _, told = call("run", *SMALL, "cfg.best_metric=msee", code=1)
    assert "Raised in the training function on rank 0" in told
    _, told = call("run", *SMALL, "cfg.best_metric=msee", "--resume", code=1)
    assert "cfg.best_metric is 'msee'" in told


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_run_that_is_stopped_is_told_like_any_other(project, monkeypatch, number, code):
    kill = os.kill
    monkeypatch.setenv("DRIVER_PID", str(os.getpid()))
    monkeypatch.setattr(os, "kill", lambda pid, one: kill(pid, number if one == signal.SIGINT else one))
    words = ["cfg.start_workers=0", "cfg.num_epochs=1000", "cfg.interrupt_at=[0, 1]", "--json"]
    shown, _ = call("run", *words, code=code)
    assert json.loads(shown)["state"] == "STOPPED"


def test_run_that_cannot_be_resumed_is_refused_without_a_traceback(project):
    call("run", *SMALL, "cfg.fail_at=[0, 0]", code=1)
    (project / "results/experiment/run_001/call.pkl").unlink()
    _, told = call("run", *SMALL, "cfg.fail_at=[0, 0]", "--resume", code=2)
    assert "does not hold the call" in told
    assert "Traceback" not in told


def test_folders_in_front_do_not_hide_the_run_to_resume(project):
    call("run", *SMALL, "cfg.fail_at=[0, 2]", code=1)
    results, names = project / "results/experiment", ["run.json", "status.json", "call.pkl"]
    for number in (1, 2, 3):
        other = results / f"run_00{number + 1}"
        other.mkdir()
        for name in names[:number]:
            data = (results / "run_001" / name).read_bytes()
            (other / name).write_bytes(data[:-1] + b"?" if name == "call.pkl" else data)
    words = ["run", *SMALL, "cfg.fail_at=[0, 2]", "--resume"]
    assert "goes on there: leave out --engine ray" in call(*words, "--engine", "ray", code=2)[1]
    assert "choose one" in call(*words, "--force", code=2)[1]
    assert "paceline: This is experiment/run_001, in /" in call(*words)[1]
    assert paceline.load_run(results / "run_001").status.state == "SUCCEEDED"


def test_resumed_run_gets_the_configuration_that_a_kill_kept_from_it(project):
    call("run", *SMALL, "cfg.fail_at=[0, 0]", code=1)
    conf = project / "results/experiment/run_001/conf.yaml"
    before = conf.read_text()
    conf.unlink()
    call("run", *SMALL, "cfg.fail_at=[0, 0]", "--resume")
    assert conf.read_text() == before


def test_datasets_that_are_made_again_have_the_random_numbers_of_the_run(project, monkeypatch):
    """Those of Ray are not in the folder."""
    drawn = []
    monkeypatch.setattr(running, "ray_datasets", lambda experiment: drawn.append(first_weights(experiment)))
    call("run", *SMALL, "cfg.fail_at=[0, 0]", code=1)
    load_call(project / "results/experiment/run_001").train_func.make_dataset()
    assert len(drawn) == 2
    assert drawn[0] == drawn[1] != []


def first_weights(experiment):
    return next(iter(vars(experiment.models).values())).state_dict().popitem()[1].flatten().tolist()


def test_same_configuration_begun_by_another_meanwhile_is_not_run_twice(project, monkeypatch):
    """Between the first look and the folder, another process makes its run."""
    import paceline.experiment.running as running

    build = running._try

    def build_while_another_runs(work):
        monkeypatch.setattr(running, "_try", build)
        call("run", *SMALL)
        return build(work)

    monkeypatch.setattr(running, "_try", build_while_another_runs)
    assert "has been run with this code: experiment/run_001, SUCCEEDED." in call("run", *SMALL)[1]
    assert os.listdir(project / "results/experiment") == ["run_001"]


def test_lock_of_a_process_that_stands_still_is_not_waited_for_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.runs.driver_lock._MOST_WAIT_S", 0.0)
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        is_inside = False
        with alone_in(tmp_path):
            is_inside = True
        assert is_inside
    finally:
        os.close(fd)


def test_file_that_is_no_text_is_refused_by_bind_too(project):
    (project / "conf.yaml").write_bytes(b"\xff\xfe\x00")
    assert "cannot be read" in call("bind", code=2)[1]
    (project / "conf.yaml").unlink()
    (project / "conf.yaml").mkdir()
    assert "conf.yaml cannot be" in call("bind", code=2)[1]


@pytest.mark.parametrize(("project_table", "name"), [('[project]\nname = "digits"\n', "digits"), ("", None)])
def test_reset_of_a_damaged_file_says_how_runs_are_called_now(project, project_table, name):
    """They were called as `train new` has called them, most likely, and not as the code has it."""
    with (project / "pyproject.toml").open("a") as file:
        file.write(project_table)
    name, conf = name or project.name, project / "conf.yaml"
    conf.write_text("<<<<<<< HEAD\ntypes: [\n")
    assert f"name that the runs had could not be read in conf.yaml: they are called '{name}' from" in reset()
    assert f"\n  name: {name}\n" in conf.read_text()
    for readable in (conf.read_text().replace(f"name: {name}", "name: other"), ""):
        conf.write_text(readable)
        assert "could not be read" not in reset()
        assert ("\n  name: other\n" if readable else "\n  name: experiment\n") in conf.read_text()


def test_reset_of_a_file_whose_configuration_is_of_another_class(project):
    """As after a `TrainConfig` of one's own was written: the name was in the section of the former one."""
    call("bind")
    conf = project / "conf.yaml"
    sections = conf.read_text()
    assert sections.count("ExactConfig:\n") == 1
    conf.write_text(sections.replace("ExactConfig:\n", "FormerConfig:\n").replace("name: experiment", "name: former"))
    assert f"they are called '{project.name}' from now on" in reset()
    assert f"\n  name: {project.name}\n" in conf.read_text()


def test_names_of_any_language():
    for name in ("می\u200cروم", "5\u00a0m", "digits 2", "x" * 255, "run_1", "-x", "rerun_001"):
        assert can_name_runs(name), name
    for name in ("", ".a", "a/b", "a\nb", "a\u2028b", "a\0", "\ud800", "ä" * 128, "run_001", "run_1234"):
        assert not can_name_runs(name), name


def test_reset_of_a_damaged_file_leaves_the_name_that_the_code_has(project, monkeypatch):
    (project / "conf.yaml").write_text("a: [")
    with (project / "pyproject.toml").open("a") as file:
        file.write('[project]\nname = ".hidden"\n')
    assert "they are called 'experiment' from now on" in reset(), "since no runs can be called as the project"
    monkeypatch.setattr("paceline.experiment.binding.TrainConfig.name", "another")
    (project / "conf.yaml").write_text("a: [")
    (project / "pyproject.toml").write_text((project / "pyproject.toml").read_text().replace(".hidden", "shown"))
    assert "they are called 'experiment' from now on" in reset()


@pytest.mark.parametrize("text", ["# mine\n\n  # and this\n", "null\n", "---\n", "{}\n", "{}  # mine\n"])
def test_file_without_a_single_section(project, text):
    conf = project / "conf.yaml"
    conf.write_text(text)
    assert "missing: cfg" in call("bind", "--check", code=1)[1]
    assert "+typed_experiment.Models:" in call("bind", "--diff")[0]
    assert "added: cfg" in call("bind")[1]
    assert [line for line in conf.read_text().splitlines() if "#" in line] == text.splitlines()[::2] * text.startswith(
        "#"
    )
    call("bind", "--check")


@pytest.mark.parametrize("name", ["a/b", "..", "run_001", ".trash", "''", '"a\\nb"', '"\\e[2J"', "x" * 300], ids=repr)
def test_name_that_no_folder_of_runs_can_have(project, name):
    """.trash is where `xp gc` deletes."""
    assert "expected the name of a folder" in call("run", *SMALL, f"cfg.name={name}", code=2)[1]
    assert not (project / "results").exists()


def reset():
    return call("bind", "--reset")[1]


def test_bind_writes_where_a_link_leads(project):
    (project / "elsewhere.yaml").write_text("")
    (project / "conf.yaml").symlink_to("elsewhere.yaml")
    call("bind")
    assert (project / "conf.yaml").is_symlink()
    assert "typed_experiment.Models:" in (project / "elsewhere.yaml").read_text()


def test_configuration_that_cannot_be_written_is_told_in_words(tmp_path):
    with pytest.raises(ConfigError, match="cannot be written: No such file or directory"):
        write_conf(tmp_path / "gone" / "conf.yaml", "")


def test_huge_file_is_not_read_to_its_end(tmp_path):
    with (tmp_path / "conf.yaml").open("wb") as file:
        file.truncate(50 << 20)
    with pytest.raises(ConfigError, match="no configuration is so long"):
        read_conf(tmp_path / "conf.yaml")


@pytest.mark.parametrize("words", [["run"], ["bind"], ["bind", "--check"]])
def test_pipe_in_the_place_of_the_configuration(project, words):
    os.mkfifo(project / "conf.yaml")
    assert "conf.yaml is not a regular file" in call(*words, code=2)[1]


def test_pipe_in_the_place_of_the_settings(project):
    os.mkfifo(project / "conf.yaml")
    (project / "pyproject.toml").unlink(missing_ok=True)
    os.mkfifo(project / "pyproject.toml")
    assert "pyproject.toml cannot be read" in call("bind", code=2)[1]


def test_configuration_that_is_named_may_be_a_pipe(tmp_path, monkeypatch):
    reading, writing = os.pipe()
    os.write(writing, b"a: 1\r\n")
    os.close(writing)
    try:
        assert read_conf(Path(f"/dev/fd/{reading}"), is_named=True) == "a: 1\n"
    finally:
        os.close(reading)
    monkeypatch.setattr("paceline.experiment.project.PIPE_S", 0.0)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="nothing came from it"):
        read_conf(tmp_path / "pipe", is_named=True)
    with pytest.raises(ConfigError, match="no configuration is so long"):
        read_conf(Path("/dev/zero"), is_named=True)
    with pytest.raises(ConfigError, match="Is a directory"):
        read_conf(tmp_path, is_named=True)


def test_pipe_is_the_configuration_of_every_run_of_a_sweep(project):
    text = re.sub(r"num_epochs: \d+", "num_epochs: 7", fresh(schema_of(typed_experiment.Exact)))
    reading, writing = os.pipe()
    os.write(writing, text.encode())
    os.close(writing)
    try:
        plans = plans_of(f"/dev/fd/{reading}", ["cfg.seed=1,2"], True)
    finally:
        os.close(reading)
    asked = [plan.resolved()["cfg"] for _, plan, _ in plans]
    assert [(one["seed"], one["num_epochs"]) for one in asked] == [(1, 7), (2, 7)]


def test_what_an_editor_saves_while_it_is_bound_stays(project, monkeypatch):
    conf, real = project / "conf.yaml", binding.bind

    def bind_while_somebody_saves(schema, text=None):
        conf.write_text("# mine\n")
        return real(schema, text)

    conf.write_text("# as it was\n")
    monkeypatch.setattr(binding, "bind", bind_while_somebody_saves)
    assert "was changed while it was bound, and is left as it is now" in call("bind", code=2)[1]
    assert conf.read_text() == "# mine\n"


def test_bound_file_is_read_by_whom_it_was_before(project):
    conf = project / "conf.yaml"
    conf.touch()
    for mode in (0o600, 0o664):
        conf.write_text("")
        conf.chmod(mode)
        call("bind")
        assert conf.stat().st_mode & 0o777 == mode


def test_new_project_for_which_there_is_no_room_leaves_nothing(tmp_path, monkeypatch):
    def refuse(path, *given):
        if path.name == "experiment.py":
            real(path, "half of it")
            raise OSError(28, "No space left on device")
        real(path, *given)

    real = Path.write_text
    monkeypatch.setattr(Path, "write_text", refuse)
    (tmp_path / "there").mkdir()
    for name in ("digits", "there"):
        with pytest.raises(ConfigError, match="cannot be written"):
            make_project(tmp_path / name)
    monkeypatch.undo()
    assert not any(path.is_file() for path in tmp_path.rglob("*"))
    assert make_project(tmp_path / "digits") == tmp_path / "digits"
