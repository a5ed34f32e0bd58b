"""From a script, from `python -c`, at the prompt, in a notebook, in this process: no main guard is ever needed."""

import json
import os
import pty
import subprocess
import sys
import textwrap

import psutil
import pytest

import paceline
from paceline import SGDCallback, TorchConfig, Trainer

PROGRAM = """
import torch
import paceline
from paceline import Trainer

FACTOR = 3

class Net(torch.nn.Linear):
    pass

def train(config):
    model = torch.nn.parallel.DistributedDataParallel(Net(1, 1))
    paceline.report(rank=paceline.world_rank())
    return paceline.world_rank() * FACTOR + config["plus"]

trainer = Trainer(backend="torch", num_workers=2)
print("results", trainer.run(train, {"plus": 1}))
trainer.shutdown()
"""


def run(*command, **kwargs):
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, **kwargs)


def never_shut_down(program):
    return program.replace("trainer.shutdown()\n", "")


def test_script_without_a_main_guard(tmp_path):
    """Nor one that shuts down; with a class of its own that derives from one of a module beside it."""
    (tmp_path / "nets.py").write_text("import torch\nclass Deep(torch.nn.Linear): pass\n")
    script = tmp_path / "script.py"
    script.write_text("from nets import Deep\n" + never_shut_down(PROGRAM).replace("(torch.nn.Linear)", "(Deep)"))
    done = run(sys.executable, str(script), cwd="/")
    assert done.stdout == "results [1, 4]\n", "and nothing else: a pipe is quiet"
    assert done.stderr == ""


WITHOUT_TORCH = (
    PROGRAM.replace("import torch\n", "")
    .replace("torch.nn.Linear", "complex")
    .replace("torch.nn.parallel.DistributedDataParallel", "abs")
    .replace('backend="torch"', "backend=paceline.BackendConfig()")
)


def test_at_the_prompt():
    lines = (
        textwrap.dedent(WITHOUT_TORCH)
        .replace("\n    pass\n", "\n    pass\n\n")
        .replace('config["plus"]\n', 'config["plus"]\n\n')
    )
    done = run(sys.executable, "-i", "-q", input=lines + "\nexit()\n")
    assert "results [1, 4]" in done.stdout


def test_python_dash_c_that_never_shuts_down_ends_by_itself():
    assert run(sys.executable, "-c", never_shut_down(WITHOUT_TORCH)).stdout == "results [1, 4]\n"


def test_notebook(tmp_path):
    import nbclient
    import nbformat

    cells = [
        "import paceline\nfrom paceline import BackendConfig, Trainer\nSCALE = 2.0",
        "class Net(complex):\n    pass",
        "def train(config):\n"
        "    net = Net(1, 1)\n"
        "    print('from a worker')\n"
        "    for step in range(3):\n"
        "        paceline.report(loss=step * SCALE)\n"
        "    return type(net).__name__",
        "trainer = Trainer(BackendConfig(), num_workers=2)\ntrainer.run(train)",
        "SCALE = 5.0\nlosses = [step[0]['loss'] for step in trainer.run_iterator(train)]\nlosses",
        "def fail():\n"
        "    raise ValueError('in a cell')\n"
        "try:\n"
        "    trainer.run(fail)\n"
        "except ValueError as error:\n"
        "    print(*error.__notes__)",
        "trainer.shutdown()\ntrainer",
        "paceline.load_run(trainer.latest_run_dir)",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    env = {name: value for name, value in os.environ.items() if name != "PACELINE_PROGRESS"}
    client = nbclient.NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    client.execute(env=env)
    outputs = [json.dumps(cell["outputs"]) for cell in notebook.cells]
    assert "['Net', 'Net']" in outputs[3]
    assert "[rank 0] from a worker" in outputs[3]
    assert "SUCCEEDED" in outputs[3], "the progress display is on in a notebook"
    assert "[0.0, 5.0, 10.0]" in outputs[4], "a cell that changed is what the next run uses"
    assert "raise ValueError('in a cell')" in outputs[5], "a traceback shows the lines of the cell"
    assert "<table><caption>2 workers" in outputs[6]
    assert "ValueError: in a cell" in notebook.cells[7]["outputs"][0]["data"]["text/html"]


def test_progress_is_shown_in_a_terminal():
    program = (
        "import paceline\nfrom paceline import BackendConfig, Trainer\n"
        "Trainer(BackendConfig(), num_workers=1).run(lambda: paceline.report(loss=0.25))"
    )
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120"}
    env.pop("PACELINE_PROGRESS")
    ours, theirs = pty.openpty()
    child = subprocess.Popen([sys.executable, "-c", program], stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    shown = b""
    while True:
        try:
            chunk = os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
        if not chunk:
            break
        shown += chunk
    os.close(ours)
    assert child.wait(60) == 0
    text = shown.decode()
    assert "SUCCEEDED" in text
    assert "loss" in text
    assert "0.25" in text


def test_inline_runs_in_this_process_and_thread():
    import threading

    seen = []

    class Live(SGDCallback):
        def handle_result(self, results, **info):
            seen.append((results[0]["step"], len(progress)))

    progress = []

    def train(config):
        for step in range(3):
            progress.append(step)
            paceline.report(step=step)
        paceline.save_checkpoint(done=True)
        return os.getpid(), threading.current_thread().name, paceline.in_worker(), paceline.world_size()

    trainer = Trainer(backend="torch", num_workers=0)
    assert trainer.run(train, callbacks=[Live()]) == [(os.getpid(), "MainThread", True, 1)]
    assert seen == [(0, 1), (1, 2), (2, 3)], "each step is handled before the next begins"
    assert trainer.latest_checkpoint == {"done": True}
    assert paceline.load_run(trainer.latest_run_dir).status.state == "SUCCEEDED"
    trainer.shutdown()


def listening():
    return {one.laddr.port for one in psutil.Process().net_connections() if one.status == psutil.CONN_LISTEN}


def traces():
    """What torch and the Trainer change in a process."""
    import torch.distributed as dist

    hooks = sys.excepthook, dist.init_process_group, dist.distributed_c10d.init_process_group
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TORCHINDUCTOR_")}
    return hooks, environ, listening(), dist.is_initialized()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_inline_ddp_code_works_and_leaves_the_process_as_it_was(num_workers, monkeypatch):
    import torch
    import torch.distributed as dist

    def train():
        dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
        model(torch.ones(1, 1)).sum().backward()
        return dist.get_world_size()

    monkeypatch.setenv("MASTER_ADDR", "of the user")
    before = traces()
    with Trainer(num_workers=num_workers, engine="inline") as trainer:
        assert trainer.run(train) == [1]
        with pytest.raises(ZeroDivisionError):
            trainer.run(lambda: 1 / 0)
        assert trainer.run(train) == [1]
        assert [step[0]["x"] for step in trainer.run_iterator(lambda: [paceline.report(x=x) for x in (1, 2)])] == [1, 2]
        assert traces() != before
    assert traces() == before


def test_inline_group_that_cannot_be_joined_leaves_nothing():
    before = traces()
    trainer = Trainer(backend=TorchConfig(backend="nccl"), num_workers=0)
    with pytest.raises(RuntimeError, match="NCCL"):
        trainer.start()
    assert traces() == before


def test_group_that_the_user_has_made_serves_inline_and_stays():
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        before = traces()
        with Trainer(num_workers=0) as trainer:
            assert trainer.run(lambda: dist.get_world_size()) == [1]
            assert listening() == before[2], "a store that nobody needs"
        assert traces() == before
    finally:
        dist.destroy_process_group()


def test_inline_callback_error_is_not_taken_for_the_functions():
    class Broken(SGDCallback):
        def handle_result(self, results, **info):
            raise OSError("disk full")

    with Trainer(num_workers=0) as trainer, pytest.raises(OSError, match="disk full"):
        trainer.run(lambda: paceline.report(x=1), callbacks=[Broken()])


def test_same_function_by_hand(capsys):
    namespace = {}
    exec(
        PROGRAM.split("trainer = ")[0].replace("torch.nn.parallel.DistributedDataParallel(Net(1, 1))", "Net(1, 1)"),
        namespace,
    )
    assert namespace["train"]({"plus": 1}) == 1


def test_resume_from_a_path_in_a_new_process(results_dir):
    program = """
import sys, paceline
def train():
    checkpoint = paceline.load_checkpoint() or {"epoch": 0}
    paceline.save_checkpoint(epoch=checkpoint["epoch"] + 1)
trainer = paceline.Trainer(paceline.BackendConfig(), num_workers=2)
trainer.run(train, checkpoint=sys.argv[1] if sys.argv[1:] else None)
print(trainer.latest_checkpoint_path)
trainer.shutdown()
"""
    first = run(sys.executable, "-c", program).stdout.strip()
    second = run(sys.executable, "-c", program, first).stdout.strip()
    assert first != second
    assert paceline.read_checkpoint(second) == {"epoch": 2}
