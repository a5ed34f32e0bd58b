"""What runs in the nursery: it imports, then forks a worker whenever the driver asks.

It does nothing else. A tensor operation would start an OpenMP pool or CUDA, and neither survives a fork. It lives in a
session of its own, so that the terminal's Ctrl-C reaches the driver alone.

It is also who tidies up. Each worker adopts what its own descendants leave behind, and the nursery adopts what a worker
leaves (both are "subreapers"): a child of the nursery that is not a worker has belonged to one that is gone, whatever
session it lives in, and is ended. And it ends with the driver, after every worker. It watches the driver's process for
that: the socket stays open as long as anybody has inherited it.
"""

import contextlib
import ctypes
import gc
import importlib
import os
import pickle
import select
import shutil
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

from paceline import frameworks
from paceline.workers.edits import user_files

_PR_SET_CHILD_SUBREAPER = 36
_MESSAGE_BYTES = 1 << 16
_NUM_FDS = 4
"""That a worker is forked with: see `worker_main`."""

_END_S = 5.0
"""How long a killed process may take to end. One that takes longer is stuck in the kernel, or is another user's."""


def main(fd: int, driver_pid: int, preload: list[str]) -> None:
    control = socket.socket(fileno=fd)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until a worker has set up its answer, it must not die of it
    for number in (signal.SIGTERM, signal.SIGINT):  # who sends them to everybody lets the workers save first
        signal.signal(number, signal.SIG_IGN)
    try:
        driver = os.pidfd_open(driver_pid)
    except ProcessLookupError:
        _leave(control)
    if os.getppid() != driver_pid:
        _leave(control)
    adopt_orphans()
    with _watched(driver, control):
        _import(control, preload)
    brood = _Brood(control, driver)
    with contextlib.suppress(EOFError, ConnectionError):
        brood.serve()
    brood.end()
    _leave(control)


def _leave(control: socket.socket) -> NoReturn:
    """The driver is gone. What it had asked for and nobody has taken yet names folders that nobody else removes."""
    control.setblocking(False)
    with contextlib.suppress(OSError):
        while packet := socket.recv_fds(control, _MESSAGE_BYTES, _NUM_FDS)[0]:
            _, verb, *args = pickle.loads(packet)
            if verb == "fork":
                shutil.rmtree(args[1], ignore_errors=True)
    os._exit(0)


def adopt_orphans() -> None:
    """From now on a descendant that loses its parent becomes a child of this process."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@contextlib.contextmanager
def _watched(driver: int, control: socket.socket) -> Any:
    """End with the driver also in the middle of an import that never ends. By a thread, which is gone before the first
    fork; a signal at the parent's death would come when the thread ends that has started us."""
    done, end = os.pipe()

    def watch() -> None:
        poller = select.poll()
        poller.register(driver, select.POLLIN)
        poller.register(control, 0)  # the other end is closed
        poller.register(done, 0)
        if done not in dict(poller.poll()):
            _leave(control)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    yield
    os.close(end)
    thread.join()
    os.close(done)


def _import(control: socket.socket, preload: list[str]) -> None:
    gc.disable()  # the collector would walk every half-imported module again and again
    for module in preload:
        _tell(control, 0, module)
        with contextlib.suppress(ImportError):  # whoever needs it gets the error, in a worker, with a traceback
            importlib.import_module(module)
    user_files.remember()
    frameworks.every()  # or each worker would import what we know of them for itself
    gc.freeze()  # keep the imported pages shared with every worker
    _tell(control, 0, None)


def _tell(control: socket.socket, number: int, value: Any) -> None:
    with contextlib.suppress(ConnectionError):  # the driver's end is noticed elsewhere
        control.send(pickle.dumps((number, value)))


class _Brood:
    """The workers that live, by the number of the request that they were forked for."""

    def __init__(self, control: socket.socket, driver: int):
        self._control, self._driver = control, driver
        self._pids: dict[int, int] = {}
        self._pidfds: dict[int, int] = {}
        self._scratch_dirs: set[str] = set()
        self._left_alone = children()  # what a module has started when it was imported
        self._poller = select.poll()
        for fd in (control.fileno(), driver):
            self._poller.register(fd, select.POLLIN)

    def serve(self) -> None:
        """Until the driver is gone, or wants no more."""
        while True:
            ready = dict(self._poller.poll())
            if self._driver in ready:
                return
            ended = [pidfd for pidfd in self._pidfds.values() if pidfd in ready]
            for pidfd in ended:
                self._poller.unregister(pidfd)  # it stays ready until the driver asks for the worker's status
            if ended:
                self._end_orphans()
            if self._control.fileno() in ready:
                self._answer()

    def _answer(self) -> None:
        packet, fds, _, _ = socket.recv_fds(self._control, _MESSAGE_BYTES, _NUM_FDS)
        if not packet:
            raise EOFError
        request, verb, *args = pickle.loads(packet)
        if verb == "fork":
            number, scratch_dir = args
            self._scratch_dirs.add(scratch_dir)
            try:
                value: int | str | None = self._fork(number, fds)
            except OSError as error:  # of processes, files or memory: who asks is told, and those that live go on
                value = str(error)
        else:
            (number,) = args
            value = self._end(number)
        _tell(self._control, request, value)

    def _fork(self, number: int, fds: list[int]) -> int:
        nursery_pid = os.getpid()
        try:
            pid = os.fork()
            if not pid:
                self._become_worker(nursery_pid, *fds)
        finally:
            for fd in fds:
                os.close(fd)
        self._pids[number] = pid  # first: `end` finds it by that
        self._pidfds[number] = os.pidfd_open(pid)
        self._poller.register(self._pidfds[number], select.POLLIN)
        return pid

    def _become_worker(self, nursery_pid: int, *fds: int) -> None:
        try:
            self._control.close()
            for fd in (self._driver, *self._pidfds.values()):
                os.close(fd)
            from paceline.workers.worker_process import worker_main

            commands, *pipes = fds
            worker_main(nursery_pid, socket.socket(fileno=commands), *pipes)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(1)

    def _end(self, number: int) -> int | None:
        pid = self._pids.pop(number, None)
        if pid is None:
            return None
        pidfd = self._pidfds.pop(number, None)
        if pidfd is not None:  # else there was no file left for it
            with contextlib.suppress(KeyError):
                self._poller.unregister(pidfd)
            os.close(pidfd)
        is_over, status = os.waitpid(pid, os.WNOHANG)
        self._end_orphans()  # if it is not over, it is now one of them
        return status if is_over else None

    def _end_orphans(self) -> None:
        """With their descendants, which become our children one by one."""
        deadline = time.monotonic() + _END_S
        while orphans := children() - self._left_alone - {*self._pids.values()}:
            if time.monotonic() > deadline:
                self._left_alone |= orphans
            for pid in orphans:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            time.sleep(0.001)

    def end(self) -> None:
        """End all workers, and do what the driver has no more chance to do."""
        self._pids.clear()
        self._left_alone.clear()
        self._end_orphans()
        for scratch_dir in self._scratch_dirs:
            shutil.rmtree(scratch_dir, ignore_errors=True)


def children(tasks: str = "/proc/self/task") -> set[int]:
    """The children of this process. Not every kernel lists them, and looking at all processes takes long."""
    lists: list[str] = []
    with contextlib.suppress(OSError):
        lists = [path.read_text() for path in Path(tasks).glob("*/children")]
    if not lists:
        import psutil

        return {child.pid for child in psutil.Process().children()}
    return {int(pid) for pid in " ".join(lists).split()}
