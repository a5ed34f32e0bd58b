"""The driver as a program of Ray's client, as a Ray job and as a notebook, each with what it defines in `__main__`."""

import contextlib
import json
import os
import random
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

RAY = [sys.executable, "-m", "ray.scripts.scripts"]

PROGRAM = """
import json, os, signal, sys
import paceline
from paceline import BackendConfig, SGDCallback, Trainer

SCALE = 3

class Answer:
    def __init__(self, rank):
        self.value = rank * SCALE

class Listener(SGDCallback):
    losses, num_restarts = [], 0

    def handle_result(self, results, **info):
        self.losses.append([report["loss"] for report in results])

    def handle_restart(self, attempt, reason, **info):
        self.num_restarts = attempt

def train(config):
    "Rank 1 is killed once, when there is a checkpoint."
    if paceline.load_checkpoint() is None:
        paceline.report(loss=paceline.world_rank() + config["plus"])
        paceline.save_checkpoint(epoch=1)
        paceline.load_checkpoint()
        if paceline.world_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    return Answer(paceline.world_rank())

listener = Listener()
with Trainer(backend=BackendConfig(), num_workers=2, engine="ray") as trainer:
    answers = trainer.run(train, {"plus": 0.5}, callbacks=[listener])
    print("told", json.dumps({
        "values": [answer.value for answer in answers],
        "are_ours": all(type(answer) is Answer for answer in answers),
        "losses": listener.losses,
        "num_restarts": listener.num_restarts,
        "checkpoint": trainer.latest_checkpoint,
        "state": paceline.load_run(trainer.latest_run_dir).status.state,
    }))
"""

WITH_A_DATASET = """
import ray.data
try:
    Trainer(backend=BackendConfig()).run(train, {}, dataset=ray.data.range(4))
except ValueError as error:
    assert "ray job submit" in str(error), error
else:
    raise AssertionError("a dataset was accepted, though its parts cannot be sent")
"""

EXPECTED = {
    "values": [0, 3],
    "are_ours": True,
    "losses": [[0.5, 1.5]],
    "num_restarts": 1,
    "checkpoint": {"epoch": 1},
    "state": "SUCCEEDED",
}


@pytest.fixture(scope="module")
def cluster():
    """A cluster with all that drivers connect to, and the environment by which they find it and are let in."""
    folder = tempfile.mkdtemp(prefix="ray_", dir="/tmp")  # the path of a socket may not be long
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    env |= {"RAY_worker_niceness": "0", "RAY_raylet_start_wait_time_s": "120"}
    env["RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S"] = "120"  # a busy machine takes longer than Ray would wait
    client, dashboard, agent = free_ports(3)
    options = ["--head", "--block", "--log-color=false", "--port=0", "--num-cpus=4", "--object-store-memory=150000000"]
    # Ray's own choice for the agent is the same number for every cluster: the second on a machine gets no agent.
    ports = [f"--ray-client-server-port={client}", f"--dashboard-port={dashboard}"]
    ports += [f"--dashboard-agent-listen-port={agent}"]
    command = [*RAY, "start", *options, *ports, f"--temp-dir={folder}"]
    head = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
    try:
        said = ""
        while "--block" not in said:
            line = head.stdout.readline()
            assert line, f"Ray did not start:\n{said}"
            said += line
        address = re.search(r"--address='(\S+)'", said).group(1)
        # A client that comes before the agent is up hangs for a minute: its server dies at its birth.
        submit = [*RAY, "job", "submit", f"--address=http://127.0.0.1:{dashboard}", "--no-wait", "--", "true"]
        assert any(ended(submit, env)[0] == 0 for _ in range(30)), "Ray's agent did not come up"
        yield SimpleNamespace(
            address=address, client=f"ray://127.0.0.1:{client}", jobs=f"http://127.0.0.1:{dashboard}", env=env
        )
    finally:
        processes = psutil.Process(head.pid).children(recursive=True)
        head.terminate()
        head.communicate()
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        shutil.rmtree(folder, ignore_errors=True)


def free_ports(count):
    """Where nobody listens. Ray has to be told a number: one that the kernel never gives to those who let it choose,
    and that is none of Ray's own for its workers, so that it is still free when Ray gets there."""
    first_chosen = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = []
    for port in random.sample(range(20_000, first_chosen), k=100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports.append(port)
    return ports[:count]


NOT_CONNECTED = ("try again later", 'client_builder.py", line')
"""What is said when Ray's agent is not up yet, and where Ray's client hangs when its server died at its birth, which
happens once in a while: the client then waits for a thread that waits for the server."""


def told(command, env):
    """What the program told, once it could connect."""
    for _ in range(30):
        code, said = ended(command, env)
        if code == 0 or not any(excuse in said for excuse in NOT_CONNECTED):
            break
        threading.Event().wait(1.0)
    assert code == 0, said
    return json.loads(re.search(r"^told (.*)$", said, re.MULTILINE).group(1))


def ended(command, env):
    """The exit code of the program and what it said; one that does not end is made to say where it is."""
    env = {**env, "PYTHONFAULTHANDLER": "1"}
    program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
    try:
        said, _ = program.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        program.send_signal(signal.SIGABRT)
        said, _ = program.communicate()
    return program.returncode, said


def test_client_program(cluster):
    program = f"import ray\nray.init({cluster.client!r}, log_to_driver=False)\n{PROGRAM}{WITH_A_DATASET}"
    assert told([sys.executable, "-c", program], cluster.env) == EXPECTED


def test_job(cluster, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    submit = [*RAY, "job", "submit", f"--address={cluster.jobs}", "--log-color=false", "--"]
    assert told([*submit, sys.executable, str(script)], cluster.env) == EXPECTED


def test_notebook(cluster, tmp_path):
    import nbclient
    import nbformat

    cells = [
        "import torch, paceline\nfrom paceline import Trainer\nSCALE = 2.0",
        "class Net(torch.nn.Linear):\n    pass",
        "def train(config):\n"
        "    net = torch.nn.parallel.DistributedDataParallel(Net(1, 1))\n"
        "    print('from a worker')\n"
        "    paceline.report(loss=SCALE)\n"
        "    paceline.save_checkpoint(net=net.module.state_dict())\n"
        "    return type(net.module).__name__",
        "trainer = Trainer(num_workers=2, engine='ray')\ntrainer.run(train)",
        "SCALE = 5.0\n[step[0]['loss'] for step in trainer.run_iterator(train)]",
        "sorted(trainer.latest_checkpoint['net'])",
        "trainer.shutdown()",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    place = {"metadata": {"path": tmp_path}}
    client = nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", resources=place)
    client.execute(env={**cluster.env, "RAY_ADDRESS": cluster.address})
    outputs = [json.dumps(cell["outputs"]) for cell in notebook.cells]
    assert "['Net', 'Net']" in outputs[3]
    assert "[rank 0] from a worker" in outputs[3]
    assert "[5.0]" in outputs[4], "a cell that changed is what the next run uses"
    assert "['bias', 'weight']" in outputs[5]
