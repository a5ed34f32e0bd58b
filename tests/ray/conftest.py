"""A cluster as somebody has it who launches to one: with a dashboard, a job server and a token."""

import contextlib
import os
import random
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import urllib.request
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from lean_nodes import OPTIONS
from ray_settings import SETTINGS

RAY = [sys.executable, "-m", "ray.scripts.scripts"]


@pytest.fixture(scope="session")
def cluster(ends, wait_until):
    return ends["cluster"].enter_context(_cluster(wait_until))


@contextlib.contextmanager
def _cluster(wait_until):
    """A cluster with all that drivers connect to, and the environment by which they find it and are let in."""
    folder = tempfile.mkdtemp(prefix="ray_", dir="/tmp")  # the path of a socket may not be long
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    env |= SETTINGS
    env["RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S"] = "120"  # a busy machine takes longer than Ray would wait
    client, dashboard, agent = free_ports(3)
    options = ["--head", "--block", "--log-color=false", "--port=0", "--num-cpus=4", "--object-store-memory=150000000"]
    # Ray's own choice for the agent is the same number for every cluster: the second on a machine gets no agent.
    ports = [f"--ray-client-server-port={client}", f"--dashboard-port={dashboard}"]
    ports += [f"--dashboard-agent-listen-port={agent}"]
    command = [*RAY, "start", *options, *OPTIONS, *ports, f"--temp-dir={folder}"]
    head = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
    try:
        said = ""
        while "--block" not in said:
            line = head.stdout.readline()
            assert line, f"Ray did not start:\n{said}"
            said += line
        address = re.search(r"--address='(\S+)'", said).group(1)
        # A client that comes before the agent is up hangs for a minute: its server dies at its birth.
        for what in (f"{agent}/api/local_raylet_healthz", f"{dashboard}/api/version"):
            wait_until(partial(_answers, f"http://127.0.0.1:{what}", env["RAY_AUTH_TOKEN"]), what, 120)
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


def _answers(url, token):
    """Asked without a job, which would be three programs that import Ray, for seconds each."""
    asked = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    with contextlib.suppress(OSError), urllib.request.urlopen(asked, timeout=10):
        return True
    return False


def free_ports(count):
    """Where nobody listens. Ray has to be told a number: one that the kernel never gives to those who let it choose,
    and that is none of Ray's own for its workers, so that it is still free when Ray gets there."""
    first_chosen = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = []
    for port in random.sample(range(20_000, first_chosen), k=100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports.append(port)
    return ports[:count]
