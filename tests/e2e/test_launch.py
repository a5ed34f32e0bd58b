"""`paceline run` as a user starts it, and how it ends."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest

import paceline

PACELINE = [sys.executable, "-m", "paceline"]


@pytest.fixture
def start(tmp_path):
    """Starts the launcher on a script in a folder of its own; gives the process."""
    started = []

    def start(script, *command, **options):
        (tmp_path / "train.py").write_text(textwrap.dedent(script))
        child = subprocess.Popen(
            [*command, "train.py"],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            **options,
        )
        started.append(child)
        return child

    yield start
    for child in started:
        child.kill()
        child.communicate()


def wait_for_line(child, text):
    while text not in (line := child.stdout.readline()):
        assert line, child.stderr.read()
    return line


def test_version_and_help():
    shown = subprocess.run([*PACELINE, "--version"], capture_output=True, text=True, check=True).stdout
    assert shown == f"paceline {paceline.__version__}\n"
    shown = subprocess.run([*PACELINE, "run", "--help"], capture_output=True, text=True, check=True).stdout
    assert "paceline run -n 4 train.py --lr 0.1" in shown
    for option in ("--nproc-per-node", "--max-restarts", "--no-python", "--standalone", "--engine", "--module"):
        assert option in shown


def test_sigterm_lets_the_script_save_and_return(start, tmp_path):
    script = """
        import torch.distributed as dist
        import paceline

        dist.init_process_group("gloo")
        step = 0
        while not paceline.should_stop():
            dist.barrier()
            step += 1
            paceline.report(at=step)
            if step == 1:
                print("going", flush=True)
        paceline.save_checkpoint(at=step)
    """
    child = start(script, *PACELINE, "run", "--nproc-per-node", "2", "--standalone", "--logdir", str(tmp_path / "runs"))
    wait_for_line(child, "[rank 0] going")
    child.terminate()
    assert child.wait(60) == 128 + signal.SIGTERM, child.stderr.read()
    run = paceline.load_run(tmp_path / "runs")
    assert run.status.state == "STOPPED"
    saved = paceline.read_checkpoint(run.latest_checkpoint_path)["at"]
    assert run.metrics["at"].max() == saved, "both ranks left at the same step"


def test_script_with_a_handler_of_its_own_gets_sigterm(start, tmp_path):
    script = """
        import signal, sys, time

        def leave(number, frame):
            print("saved by myself", flush=True)
            sys.exit(143)

        signal.signal(signal.SIGTERM, leave)
        print("going", flush=True)
        while True:
            time.sleep(0.01)
    """
    child = start(script, *PACELINE, "run", "-n", "1", "--logdir", str(tmp_path / "runs"))
    wait_for_line(child, "[rank 0] going")
    child.terminate()
    shown, _ = child.communicate(timeout=60)
    assert child.returncode == 128 + signal.SIGTERM
    assert "[rank 0] saved by myself" in shown
    run = paceline.load_run(tmp_path / "runs")
    assert run.status.state == "STOPPED"
    assert run.environment["git"] is None, "that of the script's folder, which is in no repository"


def test_elastic_run_grows_with_the_cores(start, tmp_path):
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("there is one core")
    script = """
        import time
        import torch.distributed as dist
        import paceline

        dist.init_process_group("gloo")
        size, step = dist.get_world_size(), 0
        while True:
            step += 1
            paceline.report(size=size)
            paceline.save_checkpoint(step=step)
            if step == 1:
                print("size", size, flush=True)
            if size == 2:
                break
            time.sleep(0.05)
    """
    child = start(script, *PACELINE, "run", "-n", "1:2", preexec_fn=lambda: os.sched_setaffinity(0, cores[:1]))
    assert "size 1" in wait_for_line(child, "size")
    os.sched_setaffinity(child.pid, cores[:2])
    assert "size 2" in wait_for_line(child, "size")
    assert child.wait(60) == 0


def test_seeds_form(start):
    script = """
        import os
        import torch.distributed as dist
        dist.init_process_group("gloo")
        dist.barrier()
        print("rank", os.environ["RANK"], "of", dist.get_world_size())
    """
    launcher = [sys.executable, "-m", "paceline.launch.torch_distributed"]
    environ = {**os.environ, "PACELINE_SLOTS": "2"}
    child = start(script, *launcher, "--", os.path.basename(sys.executable), env=_with_this_python_first(environ))
    shown, said = child.communicate(timeout=60)
    assert child.returncode == 0, said
    assert "[rank 1] rank 1 of 2" in shown


def _with_this_python_first(environ):
    return {**environ, "PATH": os.pathsep.join([os.path.dirname(sys.executable), environ["PATH"]])}


def test_on_ray(start, ray_cluster, tmp_path):
    script = """
        import os, signal
        import torch.distributed as dist
        import paceline

        dist.init_process_group("gloo")
        dist.barrier()
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            if dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.barrier()
        paceline.report(rank_reported=dist.get_rank())
        print("rank", dist.get_rank(), "of", dist.get_world_size(), os.environ["ROLE_WORLD_SIZE"])
    """
    address = ray_cluster.get_runtime_context().gcs_address
    command = [*PACELINE, "run", "-n", "2", "--engine", "ray", "--cpus-per-worker", "1"]
    child = start(script, *command, "--logdir", str(tmp_path / "runs"), env={**os.environ, "RAY_ADDRESS": address})
    shown, said = child.communicate(timeout=120)
    assert child.returncode == 0, said
    assert "[rank 1] rank 1 of 2 2" in shown
    assert "Traceback" not in shown + said
    run = paceline.load_run(tmp_path / "runs")
    assert (run.request["engine"], run.status.state) == ("ray", "SUCCEEDED")
    assert sorted(run.metrics["rank_reported"]) == [0, 1]
