"""What a command line asks of the launcher: read, checked and refused without a single process."""

import atexit
import json
import os
import sys
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest

from paceline.backends.torchrun import torchrun_environ
from paceline.cli.app import build
from paceline.errors import ArgumentError
from paceline.launch import size, torch_distributed
from paceline.launch.ending import as_of_a_program
from paceline.launch.imports import modules_needed
from paceline.launch.launcher import program_of
from paceline.launch.program import Command, Script, go_to
from paceline.workers.base import Place


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('hello')\n")
    return "train.py"


@pytest.mark.parametrize(
    ("text", "expected"), [("1", 1), ("4", 4), ("2:4", (2, 4)), ("3:3", (3, 3)), (" 2 ", 2), ("cpu", 2), ("auto", 2)]
)
def test_size(text, expected, monkeypatch):
    monkeypatch.setattr(size, "num_cpus", lambda: 2)
    monkeypatch.setattr(size, "gpu_ids", list)
    assert size.size_of(text, {}) == expected


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("0", "at least 1"),
        ("0:2", "at least 1"),
        ("4:2", "2:4?"),
        ("two", "expected a number"),
        ("-1", "expected a number"),
        ("2:", "expected a number"),
        ("", "expected a number"),
        ("gpu", "no GPUs"),
    ],
)
def test_size_that_makes_no_sense(text, complaint, monkeypatch):
    monkeypatch.setattr(size, "gpu_ids", list)
    with pytest.raises(ArgumentError, match=complaint.replace("?", r"\?")):
        size.size_of(text, {})


def test_size_that_nobody_has_given(monkeypatch):
    monkeypatch.setattr(size, "gpu_ids", list)
    assert size.size_of(None, {}) == 1
    assert size.size_of(None, {size.SLOTS: "3"}) == 3
    assert size.size_of("2", {size.SLOTS: "3"}) == 2
    monkeypatch.setattr(size, "gpu_ids", lambda: ["0", "1"])
    assert size.size_of(None, {}) == 2
    with pytest.raises(ArgumentError, match="PACELINE_SLOTS 'many'"):
        size.size_of(None, {size.SLOTS: "many"})


def test_program(script):
    ours = Script(script, ("--lr", "1"), launcher_dir=sys.path[0], folder=os.getcwd())
    assert program_of([script, "--lr", "1"]) == ours
    assert program_of(["json.tool", "-h"], is_module=True).is_module
    assert program_of(["sh", "-c", "true"], no_python=True) == Command(("sh", "-c", "true"), os.getcwd())


@pytest.mark.parametrize(
    ("words", "options", "complaint"),
    [
        ([], {}, "no script"),
        (["nowhere.py"], {}, "no script 'nowhere.py'"),
        (["json"], {}, "say -m json"),
        (["no_such_package.train"], {"is_module": True}, "no module"),
        (["no_such_command"], {"no_python": True}, "no command"),
        (["json"], {"is_module": True, "no_python": True}, "contradict"),
    ],
)
def test_program_that_is_not_there(script, words, options, complaint):
    with pytest.raises(ArgumentError, match=complaint):
        program_of(words, **options)


def test_program_is_launched_from_a_folder_that_is_gone(tmp_path, monkeypatch):
    (gone := tmp_path / "gone").mkdir()
    (file := tmp_path / "train.py").touch()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert program_of([str(file)]).folder is None
    assert program_of(["sh", "-c", "true"], no_python=True).folder is None


def test_worker_goes_where_the_program_was_launched(tmp_path, monkeypatch, capsys):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    go_to(None)
    go_to(str(tmp_path / "nowhere"))
    assert os.getcwd() == str(tmp_path / "here")
    assert f"cannot be entered (No such file or directory: {tmp_path}/nowhere)" in capsys.readouterr().err
    (tmp_path / "here").rmdir()  # a worker's own may be gone too
    go_to(str(tmp_path / "there"))
    assert os.getcwd() == str(tmp_path / "there")


def test_program_says_in_the_run_folder_what_it_is(script, tmp_path):
    told = program_of([script, "--epochs", "3", "--api-key", "hush"]).describe_source()
    assert told == {
        "name": "train.py",
        "module": "__main__",
        "file": str(tmp_path / "train.py"),
        "line": 1,
        "source": "print('hello')\n",
        "args": ["--epochs", "3", "--api-key", "***"],
    }
    assert json.dumps(Command(("sh", "-c", "true"), os.getcwd()).describe_source())


def test_folder_and_archive_are_containers(tmp_path):
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        archive.writestr("__main__.py", "")
    (tmp_path / "train.py").write_text("")
    found = {name: Script(str(tmp_path / name)).is_container for name in ("app.zip", "train.py", ".")}
    assert found == {"app.zip": True, "train.py": False, ".": True}


REFUSED = [
    (["run", "nowhere.py"], "no script"),
    (["run", "-n", "0", "train.py"], "at least 1"),
    (["run", "-n", "4:2", "train.py"], "2:4?"),
    (["run", "--engine", "inline", "train.py"], "local or ray"),
    (["run", "--engine", "local", "--preload", "no_such_package.part", "train.py"], "no such module"),
    (["run", "--nnodes", "2", "train.py"], "--engine ray"),
    (["run", "--logdir", "s3://bucket", "train.py"], "local folder"),
    (["run", "--rdzv-backend=c10d", "--rdzv_endpoint", "localhost:0", "train.py"], "find each other"),
    (["run", "--master_port", "29500", "train.py"], "find each other"),
    (["run", "--log-dir", "logs", "train.py"], "--logdir says where"),
    (["run", "--tee", "3", "train.py"], "in the run folder"),
    (["run", "--monitor-interval", "1", "train.py"], "when it happens"),
]


@pytest.mark.parametrize(("arguments", "complaint"), REFUSED)
def test_bad_input_is_refused_in_a_line(script, arguments, complaint, capsys):
    with pytest.raises(SystemExit) as ended:
        build()(arguments)
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert complaint in told
    assert len(told.splitlines()) <= 2


def test_unknown_option_is_refused_and_one_after_the_script_is_not_ours(script, capsys):
    with pytest.raises(SystemExit) as ended:
        build()(["run", "--wat", script])
    assert ended.value.code == 2
    with pytest.raises(SystemExit):
        build()(["run", "nowhere.py", "--help"])
    assert "no script" in capsys.readouterr().err


def test_script_that_is_no_python_fails_as_python_does(script, tmp_path, capsys):
    (tmp_path / script).write_text("def broken(:\n")
    with pytest.raises(SystemExit) as ended:
        build()(["run", "--engine", "local", script])
    assert ended.value.code == 1
    told = capsys.readouterr().err
    assert told.splitlines()[-1].startswith("SyntaxError")
    assert "launcher.py" not in told


def test_seeds_form_names_the_interpreter(script, monkeypatch):
    ours = Script(script, ("--lr", "1"), launcher_dir=sys.path[0], folder=os.getcwd())
    assert torch_distributed.named_by([sys.executable, script, "--lr", "1"]) == ours
    assert torch_distributed.named_by([sys.executable, "-u", script, "--lr", "1"]) == ours
    assert torch_distributed.named_by([script, "--lr", "1"]) == ours
    assert torch_distributed.named_by([sys.executable, "-m", "json.tool"]).is_module
    assert torch_distributed.named_by([sys.executable, "-X", "dev", script]).words[1] == "-X"
    assert torch_distributed.named_by(["sh", script]) == Command(("sh", script), os.getcwd())
    with pytest.raises(ArgumentError, match="no script"):
        torch_distributed.named_by([sys.executable, "nowhere.py"])


def test_imports_are_found_through_the_users_own_modules(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models/__init__.py").write_text("")
    (tmp_path / "models/wrapped.py").write_text("from torch.nn.parallel import DistributedDataParallel\n")
    (tmp_path / "plain.py").write_text("import torch, json, plain\n")
    (tmp_path / "through.py").write_text("from models import wrapped\n")
    (tmp_path / "reports.py").write_text("import paceline\n")
    assert modules_needed(str(tmp_path / "plain.py"), sys.path) == ()
    assert "torch._dynamo" in modules_needed(str(tmp_path / "through.py"), sys.path)
    other = tmp_path / "elsewhere" / "site-packages"
    other.mkdir(parents=True)
    (other / "installed.py").write_text("from torch.nn.parallel import DistributedDataParallel\n")
    (tmp_path / "uses.py").write_text("import installed\n")
    assert modules_needed(str(tmp_path / "uses.py"), [*sys.path, str(other)]) == ()
    needed = modules_needed(str(tmp_path / "reports.py"), sys.path)
    assert "torch._dynamo" not in needed
    assert needed


@pytest.mark.parametrize(
    ("folder", "is_own"), [("lib/site-packages", False), ("lib/dist-packages", False), ("src", True)]
)
def test_what_another_python_has_installed_is_not_the_users_own(tmp_path, folder, is_own):
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / "vendored.py").write_text("from torch.nn.parallel import DistributedDataParallel\n")
    (tmp_path / "train.py").write_text("import vendored\n")
    assert bool(modules_needed(str(tmp_path / "train.py"), [str(tmp_path / folder)])) == is_own


def test_environ_is_torchruns():
    environ = torchrun_environ(Place(3, 1, 1, 4, 2), "127.0.0.1", 29500, 2, 5)
    assert environ["ROLE_RANK"] == "3"
    assert environ["GROUP_WORLD_SIZE"] == "2"
    assert environ["TORCHELASTIC_MAX_RESTARTS"] == "5"
    assert environ["TORCHELASTIC_USE_AGENT_STORE"] == "True"


def test_exit_handlers_run_last_first_whatever_they_do(capsys):
    register = atexit.register

    def fail():
        raise ValueError("in a handler")

    def never():
        print("never")

    with as_of_a_program():
        for handler in (lambda: print("first"), fail, never, lambda: atexit.register(print, "late")):
            atexit.register(handler)
        atexit.unregister(never)
    assert atexit.register is register
    shown = capsys.readouterr()
    assert shown.out.split() == ["late", "first"]
    assert "in a handler" in shown.err


def test_script_does_not_wait_for_threads_that_wait_for_work(capsys):
    go = threading.Event()
    with as_of_a_program():
        pool = ThreadPoolExecutor(1)
        pool.submit(lambda: go.wait(30) and print("work"))
        threading.Timer(0.01, go.set).start()
    assert capsys.readouterr().out == "work\n"


def test_script_waits_for_its_threads(capsys):

    go = threading.Event()
    with as_of_a_program():
        thread = threading.Thread(target=lambda: go.wait(30) and print("thread"))
        thread.start()
        threading.Timer(0.01, go.set).start()
    assert not thread.is_alive()
    assert capsys.readouterr().out == "thread\n"
