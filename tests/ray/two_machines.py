"""Two machines for a test, made of namespaces: each with an address, a host name, processes and mounts of its own.

    with two_machines(hidden=[results_dir]) as (first, second):
        first.run([sys.executable, "driver.py"])    # a program on the first machine; answers with what it printed
        first.start([…])                            # the same, without waiting for its end: a Popen
        second.power_off()                          # all that is on it is gone, and no connection says goodbye

Both run Ray with one CPU: the head is on the first, and programs on either find it by RAY_ADDRESS. Files are shared, as
by a network file system, except that the second machine sees an empty folder of its own in place of each of `hidden`.
Nothing outlives the `with` block, nor this process: a machine lives while a pipe to its first process is open. Where
namespaces cannot be had, the test that asks for them is skipped and says why.
"""

import contextlib
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile

import psutil
import pytest
from lean_nodes import OPTIONS
from ray_settings import SETTINGS

ADDRESSES = ("198.18.0.1", "198.18.0.2")
"""Of the block that is reserved for testing networks."""

SOON = {"initial_delay_ms": 1000, "period_ms": 100, "timeout_ms": 2000, "failure_threshold": 3}
"""How Ray shall look after its nodes here: by default a silent one is given up after half a minute."""

FIRST_PROCESS = """
hostname "$1" && shift
for folder in "$@"; do mount -t tmpfs tmpfs "$folder" || exit; done
ip link set lo up && echo up && read -r _
"""


class Machine:
    def __init__(self, name, address, env, hidden=()):
        self.name, self.address, self.env = name, address, env
        namespaces = ["--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        command = ["unshare", *namespaces, "bash", "-c", FIRST_PROCESS, "bash", name, *map(str, hidden)]
        pipe = subprocess.PIPE
        self._holder = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        self._programs = [self._holder]
        if self._holder.stdout.readline() != "up\n":
            pytest.skip(f"namespaces cannot be had here: {self._holder.communicate()[1].strip()}")
        self._first = psutil.Process(self._holder.pid).children()[0]

    def command(self, command):
        """What runs the command there, with the environment that the caller gives it."""
        target = f"--target={self._first.pid}"
        return ["nsenter", target, "--net", "--mount", "--uts", "--pid", "--wd", *map(str, command)]

    def run(self, command, timeout=120, **env):
        """Run a program there to its end. What it printed; an AssertionError with all it had to say if it failed."""
        env = {**self.env, **env}
        done = subprocess.run(self.command(command), capture_output=True, text=True, env=env, timeout=timeout)
        assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def start(self, command):
        """Start a program there, which ends with the machine at the latest. Its output, errors too, is in a pipe."""
        command, pipe = self.command(command), subprocess.PIPE
        program = subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True, env=self.env)
        self._programs.append(program)
        return program

    def start_ray(self, *options):
        """Have a Ray node there; what it says, once it is up."""
        size = ["--num-cpus=1", "--object-store-memory=150000000", *OPTIONS]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--log-color=false", *size]
        program = self.start([*command, f"--node-ip-address={self.address}", *options])
        said = ""
        while "--block" not in said:
            line = program.stdout.readline()
            assert line, f"Ray did not start on {self.name}:\n{said}"
            said += line
        return said

    def power_off(self):
        """Pull the cable, so that no connection is closed, and end all of its processes at once. Idempotent."""
        with contextlib.suppress(psutil.NoSuchProcess):
            if self._first.is_running():
                subprocess.run(self.command(["ip", "link", "set", "eth0", "down"]), capture_output=True)
            self._first.kill()  # the first process of a namespace takes all the others along
        while self._programs:
            program = self._programs.pop()
            program.wait()
            for stream in filter(None, (program.stdin, program.stdout, program.stderr)):
                stream.close()


@contextlib.contextmanager
def two_machines(hidden=()):
    """Both machines, with Ray. `hidden` are existing folders that the second shall not share with the first."""
    if missing := [tool for tool in ("unshare", "nsenter", "ip", "mount", "hostname") if shutil.which(tool) is None]:
        pytest.skip(f"namespaces cannot be had here without {', '.join(missing)}")
    with contextlib.ExitStack() as stack:
        folder = tempfile.mkdtemp(prefix="ray_", dir="/tmp")  # the path of a socket may not be long
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        env = _environ()
        first = Machine("machine-1", ADDRESSES[0], env)
        stack.callback(first.power_off)
        second = Machine("machine-2", ADDRESSES[1], env, [folder, *hidden])
        stack.callback(second.power_off)
        _connect(first, second)
        said = first.start_ray("--head", "--port=0", "--include-dashboard=false", f"--temp-dir={folder}")
        env["RAY_ADDRESS"] = re.search(r"--address='(\S+)'", said).group(1)
        second.start_ray(f"--address={env['RAY_ADDRESS']}")
        yield first, second


def _environ():
    """Without what the Ray of this process has set, and with a token that both machines know: each Ray process takes it
    from this variable, else from the file that RAY_AUTH_TOKEN_PATH names, else from ~/.ray/auth_token."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    health = {f"RAY_health_check_{name}": str(value) for name, value in SOON.items()}
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    return {**env, **health, **token, **SETTINGS, "RAY_USAGE_STATS_ENABLED": "0"}


def _connect(first, second):
    """A cable between them. The first has its address on a bridge: it keeps it when the cable goes with the second."""
    first.run(["ip", "link", "add", "eth0", "type", "bridge"])
    cable = f"ip link add cable netns {first._holder.pid} type veth peer name eth0 netns {second._holder.pid}"
    made = subprocess.run(cable.split(), capture_output=True, text=True)
    if made.returncode != 0:
        pytest.skip(f"a virtual cable cannot be had here: {made.stderr.strip()}")
    first.run(["ip", "link", "set", "cable", "master", "eth0", "up"])
    for machine in (first, second):
        machine.run(["ip", "address", "add", f"{machine.address}/24", "dev", "eth0"])
        machine.run(["ip", "link", "set", "eth0", "up"])
