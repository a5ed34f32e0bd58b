"""Workers of Ray by fork. Ray starts a worker as `python setup_worker.py …`, which imports Ray and becomes a Python
that imports it again; with torch that is six seconds of a core, hundreds of times. Here this file is in the place of
setup_worker.py: it has the worker forked by a process that has imported torch, say.

For the cluster that tests of one process share. Those with nodes that die, and those that are started as a user would,
by `ray start`, have the workers that Ray starts."""

import contextlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile

PLACE = "RAY_FORKED_WORKERS"
"""The variable with the path of the socket; Ray's processes inherit it."""

_MESSAGE_BYTES = 1 << 20
_ANSWER_S = 120


@contextlib.contextmanager
def forked_workers(*modules):
    """A block in which a Ray that this process starts has its workers from a process with these modules."""
    import pytest
    from ray._private import ray_constants

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        path = os.path.join(folder, "workers")
        with _listener(path, "first") as listener:
            command = [sys.executable, __file__, "--source", str(listener.fileno()), *modules]
            # Numpy and pyarrow would start threads when they are imported.
            env = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
            source = subprocess.Popen(command, pass_fds=[listener.fileno()], stdin=subprocess.DEVNULL, env=env)
        _lead(path, "first")  # the listener is closed here: if the source dies, workers are refused at once
        patch.setenv(PLACE, path)
        patch.setattr(ray_constants, "SETUP_WORKER_FILENAME", __file__)  # joined to a folder, it is itself
        try:
            yield
        finally:
            source.kill()
            source.wait()


@contextlib.contextmanager
def another_source(name, modules):
    """Within `forked_workers`: gives what makes a block in which new workers are from a process that has these modules
    besides. It is forked from the first one. Those that few tests need, and that take long to import, are not for all:
    each fork would take longer, and others would find imported what no worker of theirs has."""
    path = os.environ[PLACE]
    with _listener(path, name) as listener, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as source:
        source.settimeout(_ANSWER_S)
        source.connect(path)
        socket.send_fds(source, [json.dumps({"modules": modules}).encode()], [listener.fileno()])
        pid = int(source.recv(100))

    @contextlib.contextmanager
    def forked():
        former = os.readlink(path)
        _lead(path, name)
        try:
            yield
        finally:
            _lead(path, former)

    try:
        yield forked
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _listener(path, name):
    """Beside the path. Whoever connects waits until somebody accepts, who may still be importing."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(os.path.join(os.path.dirname(path), name))
    listener.listen(64)
    return listener


def _lead(path, name):
    """At any time there is somebody at the path."""
    os.symlink(name, f"{path}_{name}")
    os.replace(f"{path}_{name}", path)


def main(arguments):
    """As Ray's setup_worker.py, which has the workers with more of an environment of their own than some variables."""
    context, command = _parsed(arguments)
    variables = context.pop("env_vars", {})
    is_ours = context.pop("py_executable", sys.executable) == sys.executable and not any(context.values())
    if not is_ours or any(name.startswith(("LD_", "PYTHON")) for name in variables):
        import ray

        setup = os.path.join(os.path.dirname(ray.__file__), "_private/workers/setup_worker.py")
        os.execv(sys.executable, [sys.executable, setup, *arguments])
    environ = {**os.environ, **{name: os.path.expandvars(value) for name, value in variables.items()}}
    order = {"argv": command, "environ": environ, "cwd": os.getcwd()}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as source:
        source.settimeout(_ANSWER_S)
        source.connect(os.environ[PLACE])
        socket.send_fds(source, [json.dumps(order).encode()], [0, 1, 2])
        assert source.recv(1) == b"1"


def _parsed(arguments):
    """What is particular about the worker, and its command."""
    options = ("--serialized-runtime-env-context=", "--language=")
    ours = {one.partition("=")[0]: one.partition("=")[2] for one in arguments if one.startswith(options)}
    context = json.loads(ours.get("--serialized-runtime-env-context", "{}"))
    return context, [one for one in arguments if not one.startswith(options)]


def serve(listener, modules):
    """Returns in a worker that was forked, with what it is to do."""
    import gc
    import importlib

    gc.disable()
    for module in modules:
        importlib.import_module(module)
    assert len(os.listdir("/proc/self/task")) == 1, "threads do not survive a fork"
    # It keeps the token of a cluster; and two workers would draw the same numbers for the names of their tasks.
    assert "ray" not in sys.modules, "each worker has to import it for itself"
    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody here asks how they ended
    while True:
        client, _ = listener.accept()
        with client:
            packet, fds, _, _ = socket.recv_fds(client, _MESSAGE_BYTES, 3)
            if packet and os.fork() == 0:
                listener.close()
                order = json.loads(packet)
                if "modules" not in order:
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    client.send(b"1")
                    return order, fds
                client.send(str(os.getpid()).encode())
                listener, modules = socket.socket(fileno=fds.pop()), order["modules"]
                break
            for fd in fds:
                os.close(fd)
    return serve(listener, modules)  # as another source


def work(order, fds):
    """As Ray's worker, from its first line on."""
    import numpy as np

    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["environ"])
    np.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.seed()
        if "OMP_NUM_THREADS" in os.environ:  # which torch reads when it is imported
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    sys.argv[:], sys.path[0] = order["argv"], os.path.dirname(order["argv"][0])
    runpy.run_path(order["argv"][0], run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1] == "--source":
        work(*serve(socket.socket(fileno=int(sys.argv[2])), sys.argv[3:]))
    else:
        main(sys.argv[1:])
