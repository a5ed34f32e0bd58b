"""What runs in the nursery: it imports, then forks a worker whenever the driver asks.

It does nothing else. A tensor operation would start an OpenMP pool or CUDA, and neither survives a fork. It lives in a
session of its own, so that the terminal's Ctrl-C reaches the driver alone, and it ends with the driver: when the socket
closes, it kills every worker it has forked.
"""

import contextlib
import gc
import importlib
import os
import select
import shutil
import signal
import socket
import sys
from typing import Any

from paceline import frameworks
from paceline.workers.edits import user_files
from paceline.workers.framing import recv_message, send_message


def main(fd: int, preload: list[str]) -> None:
    control = socket.socket(fileno=fd)
    signal.signal(
        signal.SIGUSR1, signal.SIG_IGN
    )  # until a worker has set up its answer, it must not die of the question
    gc.disable()  # the collector would walk every half-imported module again and again
    for module in preload:
        with contextlib.suppress(ImportError):  # whoever needs it gets the error, in a worker, with a traceback
            importlib.import_module(module)
        if _driver_is_gone(control):
            os._exit(0)
    user_files.remember()
    frameworks.every()  # or each worker would import what we know of them for itself
    gc.freeze()  # keep the imported pages shared with every worker
    workers: set[int] = set()
    scratch_dirs: set[str] = set()
    try:
        _serve(control, workers, scratch_dirs)
    except (EOFError, ConnectionError):
        _kill(workers)
        for scratch_dir in scratch_dirs:  # the driver has no more chance to do it
            shutil.rmtree(scratch_dir, ignore_errors=True)
        os._exit(0)


def _serve(control: socket.socket, workers: set[int], scratch_dirs: set[str]) -> None:
    while True:
        verb, *args = recv_message(control)
        if verb == "fork":
            (specs,) = args
            _, fds, _, _ = socket.recv_fds(control, 1, 2 * len(specs))
            pairs = list(zip(fds[::2], fds[1::2], strict=True))
            pids = [_fork(spec, pair, fds, control) for spec, pair in zip(specs, pairs, strict=True)]
            for fd in fds:
                os.close(fd)
            workers.update(pids)
            scratch_dirs.update(os.path.dirname(spec["log_path"]) for spec in specs)
            send_message(control, pids)
        elif verb == "reap":
            (pid,) = args
            _, status = os.waitpid(pid, 0)
            workers.discard(pid)
            send_message(control, status)


def _fork(spec: dict[str, Any], own_fds: tuple[int, int], fds: list[int], control: socket.socket) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        control.close()
        for other in fds:
            if other not in own_fds:
                os.close(other)
        from paceline.workers.worker_process import worker_main

        sock_fd, report_fd = own_fds
        worker_main(socket.socket(fileno=sock_fd), report_fd, spec)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(1)


def _driver_is_gone(control: socket.socket) -> bool:
    if not select.select([control], [], [], 0)[0]:
        return False
    return control.recv(1, socket.MSG_PEEK) == b""


def _kill(workers: set[int]) -> None:
    for pid in workers:
        for kill in (os.killpg, os.kill):  # the group first: it holds the loaders that a worker started
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(pid, signal.SIGKILL)
