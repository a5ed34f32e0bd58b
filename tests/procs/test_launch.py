"""Scripts and commands on real workers, launched from this process, which keeps what they are forked from."""

import json
import os
import re
import textwrap

import psutil
import pytest

import paceline
from paceline.launch.as_child import run_as_child
from paceline.launch.launcher import Launch, program_of, run_to_exit_code
from paceline.launch.program import Command
from paceline.testing import as_worker


@pytest.fixture
def launch(tmp_path, monkeypatch, capfd):
    """Writes files, runs a program with 2 workers, and gives the exit code, what was printed, and the run."""
    monkeypatch.chdir(tmp_path)

    def launch(files, *words, is_module=False, no_python=False, **options):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(textwrap.dedent(text))
        program = program_of([*words], is_module=is_module, no_python=no_python)
        # Here, also if the tests before have left this process connected to Ray.
        usual = {"num_workers": 2, "engine": "local", "logdir": str(tmp_path / "runs")}
        code = run_to_exit_code(program, Launch(**{**usual, **options}))
        return code, *capfd.readouterr(), paceline.load_run(tmp_path / "runs")

    return launch


def told(shown):
    """What each rank has printed as JSON."""
    found = re.findall(r"^\[rank (\d+)\] (\{.*\})$", shown, re.MULTILINE)
    return {int(rank): json.loads(text) for rank, text in found}


PLAIN = """
    import atexit, json, os, pickle, sys
    from dataclasses import dataclass

    import torch
    import torch.distributed as dist

    import beside


    @dataclass
    class Point:
        x: int = 0


    if __name__ == "__main__":
        atexit.register(print, "farewell")
        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        print(json.dumps({
            "rank": dist.get_rank(),
            "sum": total.item(),
            "copy": pickle.loads(pickle.dumps(Point(3))).x,
            "args": sys.argv,
            "file": __file__,
            "path": sys.path[0],
            "beside": beside.value,
            "env": {name: os.environ.get(name) for name in NAMES},
        }))
        dist.destroy_process_group()
        sys.exit(0)
"""
NAMES = [
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE"),
]


def test_script_for_torchrun_runs_as_it_is(launch, tmp_path):
    files = {"scripts/train.py": PLAIN.replace("NAMES", repr(NAMES)), "scripts/beside.py": "value = 7"}
    code, shown, _, run = launch(files, "scripts/train.py", "--lr", "0.1", max_restarts=5)
    assert code == 0
    ranks = told(shown)
    assert [ranks[rank]["rank"] for rank in (0, 1)] == [0, 1]
    first = ranks[0]
    assert (first["sum"], first["copy"], first["beside"]) == (2, 3, 7)
    assert first["args"] == ["scripts/train.py", "--lr", "0.1"]
    assert (first["file"], first["path"]) == (str(tmp_path / "scripts/train.py"), str(tmp_path / "scripts"))
    expected = ["1", "1", "2", "2", "0", "1", "1", "default", "2", "127.0.0.1", "0", "5", "True"]
    assert ranks[1]["env"] == dict(zip(NAMES, expected, strict=True))
    assert sorted(line for line in shown.splitlines() if "farewell" in line) == [
        "[rank 0] farewell",
        "[rank 1] farewell",
    ]
    assert run.status.state == "SUCCEEDED"
    assert run.request["function"]["name"] == "train.py"
    assert "import beside" in run.request["function"]["source"]
    assert "farewell" in (run.path / "logs/rank_1.log").read_text()


def test_group_that_is_destroyed_before_its_models_does_not_hang(launch, tmp_path):
    script = """
        import faulthandler, os, sys, torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        def train(path):
            dist.init_process_group("gloo", init_method=f"file://{path}", rank=int(os.environ["RANK"]), world_size=2)
            model = DistributedDataParallel(torch.nn.Linear(64, 64))
            for _ in range(3):
                model(torch.ones(4, 64)).sum().backward()
            dist.destroy_process_group()

        faulthandler.dump_traceback_later(60, exit=True)
        for i in range(30):
            train(f"{sys.argv[1]}/store_{i}")
    """
    code, _, errors, _ = launch({"train.py": script}, "train.py", str(tmp_path))
    assert code == 0, errors


def test_module_that_is_killed_goes_on_from_its_checkpoint(launch):
    train = """
        import os, signal
        import torch.distributed as dist
        import paceline
        from .steps import NUM_STEPS

        dist.init_process_group("gloo")
        checkpoint = paceline.load_checkpoint()
        first = checkpoint["step"] if checkpoint else 0
        for step in range(first + 1, NUM_STEPS + 1):
            dist.barrier()
            paceline.report(step_done=step, tries=int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
            paceline.save_checkpoint(step=step)
            if step == 3 and checkpoint is None:
                paceline.load_checkpoint()  # waits until it is committed
                dist.barrier()
                if paceline.world_rank() == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
    """
    files = {"package/__init__.py": "", "package/__main__.py": train, "package/steps.py": "NUM_STEPS = 5"}
    code, _, said, run = launch(files, "package", is_module=True)
    assert code == 0, said
    metrics = run.metrics.query("rank == 0")
    assert metrics["step_done"].tolist() == [1, 2, 3, 4, 5]
    assert metrics["tries"].tolist() == [0, 0, 0, 1, 1]
    assert [event["kind"] for event in run.events if event["kind"] in ("worker_died", "restart")] == [
        "worker_died",
        "restart",
    ]
    assert run.status.state == "SUCCEEDED"


def test_command_that_is_killed_is_started_again(launch):
    text = 'echo "$RANK of $WORLD_SIZE, try $TORCHELASTIC_RESTART_COUNT: $1"\n'
    text += "[ $RANK$TORCHELASTIC_RESTART_COUNT = 10 ] && kill -9 $$\nexit 0\n"
    code, shown, _, run = launch({"train.sh": text}, "sh", "train.sh", "hello", no_python=True)
    assert code == 0
    assert "[rank 1] 1 of 2, try 0: hello" in shown
    assert "[rank 0] 0 of 2, try 1: hello" in shown
    assert run.request["function"]["name"] == "sh"
    assert "killed by SIGKILL" in next(event["reason"] for event in run.events if event["kind"] == "worker_died")


def test_exit_code_that_is_the_echo_of_a_killed_rank_is_not_the_end(launch):
    """The rank that leaves in good order is seen first: the other one is killed when it has gone."""
    script = """
        import os, sys, time
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            if os.environ["RANK"] == "0":
                sys.exit(1)
            time.sleep(0.3)
            os.abort()
    """
    code, _, said, run = launch({"train.py": script}, "train.py")
    assert code == 0, said
    assert [event["cause"] for event in run.events if event["kind"] == "restart"] == ["loss"]


def test_exception_of_one_rank_is_shown_once_without_our_lines(launch, tmp_path):
    script = """
        import os
        import torch.distributed as dist

        def fail():
            raise ValueError("of rank 1")

        dist.init_process_group("gloo")
        if os.environ["RANK"] == "1":
            fail()
        dist.barrier()
    """
    code, shown, said, run = launch({"train.py": script}, "train.py")
    assert code == 1
    assert (shown + said).count("Traceback (most recent call last)") == 1
    assert said.count("ValueError: of rank 1") == 1
    assert "Raised in the script on rank 1." in said
    assert 'train.py", line 6, in fail' in said
    assert f"{os.sep}paceline{os.sep}" not in said
    assert str(tmp_path / "runs/run_001") in said
    assert run.status.state == "FAILED"


@pytest.mark.parametrize(
    ("script", "code", "says"),
    [
        ("import sys; sys.exit()", 0, ""),
        ("import atexit, os; atexit.register(print, 'Traceback'); os._exit(0)", 0, ""),
        ("import os; os._exit(4)", 1, "the script ended with exit code 4"),
        ("import sys; sys.exit(3)", 1, "the script ended with exit code 3"),
        ("import sys; sys.exit('the reason')", 1, "the script ended with exit code 1"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 1, "and restarts are off"),
    ],
)
def test_exit_codes(launch, script, code, says):
    ended, shown, said, run = launch({"train.py": script}, "train.py", max_restarts=0, num_workers=1)
    assert ended == code
    assert says in said
    assert "Traceback" not in shown + said
    assert ("the reason" in shown) == ("the reason" in script)
    assert run.status.state == ("FAILED" if code else "SUCCEEDED")


def test_module_that_cannot_be_run(launch):
    code, _, said, _ = launch({"package/__init__.py": ""}, "package.nothing", is_module=True, num_workers=1)
    assert code == 1
    assert "There is no module 'package.nothing' that can be run." in said
    assert "Traceback" not in said


def test_exit_code_of_a_command(launch):
    code, _, said, _ = launch({}, "sh", "-c", "exit 7", no_python=True, num_workers=1)
    assert code == 1
    assert "Rank 0: the command sh ended with exit code 7." in said


def test_command_gets_sigterm_when_the_run_is_to_end(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "")
    with as_worker() as wire:
        wire.stopping = True
        run_as_child(Command(("sleep", "1000")))  # returns, and its end by a signal is no loss
    assert not [child for child in psutil.Process().children(recursive=True) if child.name() == "sleep"]


def test_processes_that_a_script_spawns_find_its_functions(launch):
    script = """
        import multiprocessing

        def double(x):
            return 2 * x

        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(double, [1, 2]))
    """
    code, shown, said, _ = launch({"train.py": script}, "train.py", num_workers=1)
    assert code == 0, said
    assert "[rank 0] [2, 4]" in shown


def test_run_is_resumed_as_any_other(launch, tmp_path):
    script = """
        import paceline
        checkpoint = paceline.load_checkpoint()
        for step in range(checkpoint["step"] if checkpoint else 0, 4):
            paceline.report(done=step)
            paceline.save_checkpoint(step=step + 1)
            if step == 1 and not checkpoint:
                raise ValueError("half-way")
    """
    code, _, _, run = launch({"train.py": script}, "train.py", num_workers=1)
    assert (code, run.status.state) == (1, "FAILED")
    paceline.Trainer.resume(tmp_path / "runs")
    run = paceline.load_run(tmp_path / "runs")
    assert run.status.state == "SUCCEEDED"
    assert run.metrics["done"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["train.py"], {}),
        (["train"], {"is_module": True}),
        (["sh", "train.sh"], {"no_python": True}),
    ],
    ids=["script", "module", "command"],
)
def test_run_is_resumed_from_another_folder_with_the_script_that_it_began_with(
    launch, tmp_path, monkeypatch, words, options
):
    """There the same words name something else, or nothing."""
    script = "import os, sys; open('lines', 'a').write('ours ') ; sys.exit(0 if os.path.exists('mended') else 1)"
    files = {"train.py": script, "train.sh": "printf 'ours ' >> lines; test -e mended"}
    code, _, _, run = launch(files, *words, num_workers=1, **options)
    assert (code, run.status.state) == (1, "FAILED")
    (tmp_path / "mended").touch()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "train.py").write_text("open('lines', 'a').write('theirs ')")
    (elsewhere / "train.sh").write_text("printf 'theirs ' >> lines")
    monkeypatch.chdir(elsewhere)
    paceline.Trainer.resume(tmp_path / "runs")
    assert not (elsewhere / "lines").exists()
    assert (tmp_path / "lines").read_text() == "ours ours "
