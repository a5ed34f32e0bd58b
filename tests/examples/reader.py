"""A Python that runs one script after the other, each as `__main__`. What they import, and the nursery of their
workers, is paid for once. For scripts of one framework that leave the process as it was, but for what is put back here:
those that connect to Ray get a process of their own."""

import contextlib
import gc
import importlib
import json
import logging
import os
import random
import runpy
import socket
import subprocess
import sys
import threading
import traceback
import warnings

import psutil

from paceline.workers import local


class Reader:
    """The process, from the first script on; a new one after a script that failed or was ended."""

    def __init__(self, framework, folder):
        self._framework = framework
        self._files = [open(folder / name, "a+") for name in ("stdout", "stderr")]  # noqa: SIM115 (closed with us)
        self._process = None

    @property
    def infos(self):
        """The processes that may outlive a test: this one and its nursery, but no worker."""
        return [self._process, *psutil.Process(self._process.pid).children()] if self._process else []

    def run(self, script, *args, cwd, timeout=150):
        """As `subprocess.run`. What its workers print is in these files too, since the nursery has inherited them."""
        for file in self._files:
            file.truncate(0)
        if self._process is None:
            self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                command, (out, err) = [sys.executable, __file__, str(theirs.fileno()), self._framework], self._files
                self._process = subprocess.Popen(command, stdout=out, stderr=err, pass_fds=[theirs.fileno()])
        order = {"argv": [*map(str, (script, *args))], "cwd": str(cwd), "environ": dict(os.environ)}
        self._control.settimeout(timeout)
        code = None
        try:
            self._control.send(json.dumps(order).encode())
            code = int(self._control.recv(100) or self._process.wait(timeout))
        finally:
            if code != 0:
                self.close()
        shown = [file.seek(0) or file.read() for file in self._files]
        return subprocess.CompletedProcess(order["argv"], code, *shown)

    def end(self, within_s=60):
        """As a script of its own would end, after all of them: an error if that hangs or fails."""
        if self._process:
            self._control.close()
            try:
                assert self._process.wait(within_s) == 0, f"it ended with {self._process.returncode}"
            finally:
                self.close()

    def close(self):
        if self._process:
            self._control.close()
            self._process.kill()  # its nursery ends with it
            self._process.wait()
            self._process = None


def main(control):
    while order := control.recv(1 << 20):
        with put_back():
            code = run(**json.loads(order))
        control.send(str(code).encode())


def run(argv, cwd, environ):
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv[:], sys.path[0] = argv, os.path.dirname(argv[0])
    code = 0
    try:
        runpy.run_path(argv[0], run_name="__main__")
    except BaseException as error:
        code = int(not isinstance(error, SystemExit) or error.code not in (None, 0))
        traceback.print_exc() if code else None
    for thread in threading.enumerate():  # Python waits for these too, before it ends
        if not thread.daemon and thread is not threading.main_thread():
            thread.join()
    sys.stdout.flush()
    return code


@contextlib.contextmanager
def put_back():
    import numpy as np

    path, modules, root = sys.path[:], set(sys.modules), logging.getLogger()
    handlers, level = root.handlers[:], root.level
    with warnings.catch_warnings(), put_torch_back() if "torch" in modules else contextlib.nullcontext():
        yield
    gc.collect()  # a Trainer that the script has left open ends with it
    for name in set(sys.modules) - modules:  # libraries may stay, what lies beside a script may not
        if str(getattr(sys.modules[name], "__file__", None)).startswith(sys.path[0]):
            del sys.modules[name]
    sys.path[:], root.handlers[:] = path, handlers
    root.setLevel(level)
    random.seed()
    np.random.seed()


@contextlib.contextmanager
def put_torch_back():
    import torch

    dtype, num_threads = torch.get_default_dtype(), torch.get_num_threads()
    exact = torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_default_dtype(dtype)
    torch.set_num_threads(num_threads)
    torch.use_deterministic_algorithms(exact)
    torch.seed()


if __name__ == "__main__":
    if sys.argv[2] == "torch":  # of which we know what to put back. A driver need not import the others
        importlib.import_module("torch")
    # Else the workers of nearly every script import these for themselves, or have a nursery of their own for them.
    local.WORKER_MODULES += ("sklearn.datasets", *(("flax.nnx", "optax") if sys.argv[2] == "jax" else ()))
    main(socket.socket(fileno=int(sys.argv[1])))
