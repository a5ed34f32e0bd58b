"""However the driver ends, its workers end too, and the run folder tells the truth."""

import contextlib
import os
import signal
import subprocess
import sys

import psutil
import pytest

import paceline

PROGRAM = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell may have turned it off
import paceline
from paceline import Trainer

def train():
    import subprocess
    child = subprocess.Popen(["sleep", "1000"])
    print("pids", os.getpid(), child.pid, flush=True)
    paceline.report(step=1)
    while True:
        {work}

trainer = Trainer(backend={backend}, num_workers=2, preemption_grace_s={grace_s})
print("run", trainer.logdir, flush=True)
trainer.run(train)
"""
SLEEPING, BUSY, COLLECTIVE = "time.sleep(0.01)", "pass", "import torch; torch.distributed.barrier()"


@pytest.fixture
def driver(request):
    """A training program in its own process group, as under a shell; gives it, its run folder and its processes."""
    work, backend, grace_s = request.param
    program = PROGRAM.format(work=work, backend=backend, grace_s=grace_s)
    child = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    logdir, pids = None, []
    while len(pids) < 4:
        line = child.stdout.readline()
        assert line, child.stderr.read()
        if line.startswith("run "):
            logdir = line.split()[1]
        elif "pids" in line:
            pids += [int(word) for word in line.split("pids")[1].split()]
    nursery = psutil.Process(pids[0]).parent()
    yield child, f"{logdir}/run_001", [*pids, nursery.pid]
    for pid in [*pids, nursery.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    child.kill()
    child.communicate()


WAYS = [
    (SLEEPING, "paceline.BackendConfig()", 0.5),
    (BUSY, "paceline.BackendConfig()", 0.5),
    (COLLECTIVE, "'torch'", 0.5),
]
PATIENT = (SLEEPING, "paceline.BackendConfig()", 100)


@pytest.mark.parametrize("driver", WAYS, indirect=True, ids=["sleeping", "busy", "in a collective"])
def test_driver_dies(driver, wait_for_end):
    child, run_dir, pids = driver
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    wait_for_end(pids)
    assert paceline.load_run(run_dir).status.state == "LOST"


@pytest.mark.parametrize("driver", WAYS, indirect=True, ids=["sleeping", "busy", "in a collective"])
def test_interrupt_from_the_keyboard(driver, wait_for_end):
    child, run_dir, pids = driver
    os.killpg(child.pid, signal.SIGINT)  # the terminal sends it to the whole foreground group
    _, errors = child.communicate(timeout=60)
    assert child.returncode != 0
    assert "KeyboardInterrupt: the run was stopped" in errors
    assert "controller.py" not in errors, "none of our internals"
    wait_for_end(pids)
    status = paceline.load_run(run_dir).status
    assert status.state == "STOPPED"
    assert "keyboard" in status.reason


@pytest.mark.parametrize("driver", [PATIENT], indirect=True, ids=["sleeping"])
def test_interrupt_twice(driver, wait_for_end):
    """It would have a long time to return."""
    child, run_dir, pids = driver
    os.killpg(child.pid, signal.SIGINT)
    while "Ctrl-C once more" not in child.stderr.readline():
        assert child.poll() is None
    os.killpg(child.pid, signal.SIGINT)
    _, errors = child.communicate(timeout=60)
    assert "KeyboardInterrupt: the run was stopped" in errors
    wait_for_end(pids)
    assert paceline.load_run(run_dir).status.state == "STOPPED"


@pytest.mark.parametrize("driver", WAYS[:1], indirect=True, ids=["sleeping"])
def test_driver_is_terminated_and_the_function_does_not_listen(driver, wait_for_end):
    child, run_dir, pids = driver
    os.kill(child.pid, signal.SIGTERM)
    assert child.wait(timeout=60) == 128 + signal.SIGTERM
    wait_for_end(pids)
    status = paceline.load_run(run_dir).status
    assert (status.state, status.reason) == ("STOPPED", "the driver got SIGTERM")


@pytest.mark.parametrize("driver", [PATIENT], indirect=True, ids=["sleeping"])
def test_driver_is_terminated_twice(driver, wait_for_end):
    child, run_dir, pids = driver
    while child.returncode is None:  # two that come together are one
        os.kill(child.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=0.05)
    assert child.returncode == -signal.SIGTERM, "at once"
    wait_for_end(pids)
    assert paceline.load_run(run_dir).status.state == "LOST"


@pytest.mark.parametrize("driver", WAYS[:1], indirect=True, ids=["sleeping"])
def test_what_was_reported_is_in_the_folder_when_the_driver_dies(driver, wait_for_end, wait_until):
    child, run_dir, pids = driver
    metrics = f"{run_dir}/metrics.jsonl"
    wait_until(lambda: os.path.exists(metrics) and os.path.getsize(metrics))
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    wait_for_end(pids)
    assert paceline.load_run(run_dir).metrics["step"].tolist() == [1, 1]


def test_driver_dies_while_its_nursery_is_importing(wait_for_end):
    program = (
        "import time; from paceline.workers.nursery import shared_nursery\n"
        "print(shared_nursery(['torch']).pid, flush=True); time.sleep(100)"
    )
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    nursery = int(child.stdout.readline())
    child.kill()
    child.communicate()
    wait_for_end([nursery])


def test_driver_dies_and_leaves_a_child_that_has_inherited_its_sockets(wait_for_end):
    program = """
import os, subprocess, time
from paceline.workers.base import Call, Preload, Resources, Returned, Size
from paceline.workers.local import LocalEngine

group = LocalEngine().group(Size(1, 1), Resources(), Preload())
group.start()
group.submit({0: Call(lambda wire: subprocess.Popen(["sleep", "1000"], start_new_session=True).pid)})
events = []
while not events:
    group.poll(0.1, events.append)
child = os.fork()
if child:
    print(group.infos[0].pid, events[0].value, child, flush=True)
time.sleep(1000)
"""
    driver = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    worker, of_worker, child = (int(pid) for pid in driver.stdout.readline().split())
    nursery = psutil.Process(worker).ppid()
    driver.kill()
    driver.wait()
    try:
        wait_for_end([worker, of_worker, nursery])
        os.kill(child, 0)  # it lives
    finally:
        for pid in (of_worker, worker, nursery, child):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        driver.stdout.close()


FORKS = """
import gc, os, signal, sys, time
import paceline
from paceline import BackendConfig, SGDCallback, Trainer

go = sys.argv[1]

def train():
    paceline.report(step=1)
    while not os.path.exists(go):
        time.sleep(0.01)
    paceline.report(step=2)
    return "done"

def fork(name, way):
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        way()
        sys.exit(7)
    print(name, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)

class ForksInACallback(SGDCallback):
    def handle_result(self, results, **info):
        if results[0]["step"] == 1:
            fork("callback", lambda: None)

    def finish_training(self, error=False, **info):
        print("finished", info["status"], flush=True)

def fail():
    raise ValueError("child")

def close():
    steps.close()

def collect():
    global steps
    trainer._iterator = steps = None
    gc.collect()

def go_on():
    try:
        next(steps)
    except paceline.errors.TrainerStateError as error:
        assert "another process" in str(error)

def terminate():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)

def train_itself():
    assert trainer.run(lambda: "own") == ["own"] * 2

with Trainer(backend=BackendConfig(), num_workers=2) as trainer:
    steps = trainer.run_iterator(train, callbacks=[ForksInACallback()])
    next(steps)
    for way in (fail, close, collect, go_on, terminate, train_itself):
        fork(way.__name__, way)
    open(go, "w").close()
    print("rest", [one["step"] for one in next(steps)])
    print(steps.get_final_results(force=True))
print(paceline.load_run(trainer.latest_run_dir).status.state)
"""


def test_fork_of_the_driver_leaves_the_run_alone(tmp_path):
    """However it ends: by sys.exit through the `with` blocks, by an exception, by a signal, when it forgets the run."""
    program = [sys.executable, "-c", FORKS, str(tmp_path / "go")]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=60)
    assert ended.stdout.splitlines() == [
        "callback 7",
        "fail 1",
        "close 7",
        "collect 7",
        "go_on 7",
        f"terminate {-signal.SIGTERM}",
        "train_itself 7",
        "rest [2, 2]",
        "finished SUCCEEDED",
        "['done', 'done']",
        "SUCCEEDED",
    ], ended.stderr


LOOPING = """
import numpy as np
from paceline.data import from_numpy

data = from_numpy({"x": np.arange(1000)})
np.kept = [iter(one.iter_batches(10)) for one in (data, data.map(dict))]  # a module is the last to let go of anything
print([next(batches)["x"].tolist()[:2] for batches in np.kept])
"""


def test_loop_over_data_that_is_alive_at_the_end_of_a_program_ends_silently():
    done = subprocess.run([sys.executable, "-c", LOOPING], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == ("[[0, 1], [0, 1]]\n", "", 0)
