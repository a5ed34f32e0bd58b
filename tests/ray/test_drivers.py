"""The driver as a program of Ray's client, as a Ray job and as a notebook, each with what it defines in `__main__`."""

import json
import re
import signal
import subprocess
import sys
import threading

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


NOT_CONNECTED = ("try again later", 'client_builder.py", line')
"""What is said when Ray's agent is not up yet, and where Ray's client hangs when its server died at its birth, which
happens once in a while: the client then waits for a thread that waits for the server."""


def told(command, env):
    """What the program told, once it could connect."""
    for number in range(30):
        code, said = ended(command, {**env, "CONNECT_S": str(15 * (number + 1))})
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
    connect = (
        "import faulthandler, os, ray\n"
        "faulthandler.dump_traceback_later(float(os.environ['CONNECT_S']), exit=True)\n"
        f"ray.init({cluster.client!r}, log_to_driver=False)\n"
        "faulthandler.cancel_dump_traceback_later()\n"
    )
    program = f"{connect}{PROGRAM}{WITH_A_DATASET}"
    assert told([sys.executable, "-c", program], cluster.env) == EXPECTED


CONNECTS_ANEW = """
import json, sys
import numpy as np, ray
from paceline.errors import WorkersLostError
from paceline.sgd import DistributedSGD, NumpyModel

class Falling(NumpyModel):
    learning_rate = 1.0

    def __init__(self):
        self.weights = {"w": np.zeros(1)}

    def loss_and_grad(self):
        return 1.0, {"w": np.ones(1)}

ray.init(sys.argv[1], log_to_driver=False)
sgd = DistributedSGD(Falling, 2, use_cpus=True, strategy="simple", verbose=False, engine="ray")
sgd.step()
ray.shutdown()
ray.init(sys.argv[1], log_to_driver=False)
try:
    sgd.step()
except WorkersLostError as error:
    print("told", json.dumps(str(error)))
"""


def test_who_connects_anew_between_two_steps_has_lost_the_workers(cluster):
    """They were those of the former connection, and have ended with it."""
    error = told([sys.executable, "-c", CONNECTS_ANEW, cluster.address], cluster.env)
    assert "No worker is left that has the state" in error
    assert "has left its cluster, by ray.shutdown()" in error


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
