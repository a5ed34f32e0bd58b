"""The driver's handle on the nursery: a process with the framework imported, from which workers are forked.

Starting a process and importing torch takes seconds, forking one that has it takes milliseconds. A nursery is started
in the background as soon as a Trainer exists, and serves every Trainer of this process that wants the same imports.
"""

import atexit
import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

from paceline.errors import WorkerStartError
from paceline.workers.framing import recv_message, send_message

_START = "import sys; from paceline.workers.nursery_process import main; main(int(sys.argv[1]), sys.argv[2:])"


class Nursery:
    """One nursery process. Thread-safe: requests are answered one at a time."""

    def __init__(self, preload: Sequence[str]):
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, str(theirs.fileno()), *preload],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        self._control = ours
        self._lock = threading.Lock()
        self._owner_pid = os.getpid()

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_alive(self) -> bool:
        """False in a fork of the driver too: the socket belongs to the parent."""
        return self._owner_pid == os.getpid() and self._process.poll() is None

    def fork(self, specs: list[dict[str, Any]], fds: list[tuple[int, int]]) -> list[int]:
        """Fork one worker for each spec, each with its socket and its end of the report pipe. Waits for the imports
        when they are not done."""
        with self._lock, self._explained():
            send_message(self._control, ("fork", specs))
            socket.send_fds(self._control, [b"f"], [fd for pair in fds for fd in pair])
            pids: list[int] = recv_message(self._control)
            return pids

    def reap(self, pid: int) -> int | None:
        """The wait status of a worker that has ended; None when the nursery is gone too."""
        with self._lock:
            try:
                send_message(self._control, ("reap", pid))
                status: int = recv_message(self._control)
            except (EOFError, OSError):
                return None
            return status

    def close(self) -> None:
        self._control.close()
        if self._owner_pid == os.getpid():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=5)
                return
            self._process.kill()
            self._process.wait()

    @contextlib.contextmanager
    def _explained(self) -> Any:
        try:
            yield
        except (EOFError, OSError) as error:
            raise WorkerStartError(
                f"The process that forks workers (pid {self.pid}) ended while workers were being started"
                f" ({error}). Its own error, if any, is above; the usual causes are memory running out and"
                " a framework that fails to import."
            ) from error


_shared: dict[tuple[str, ...], Nursery] = {}
_shared_lock = threading.Lock()


def shared_nursery(preload: Sequence[str]) -> Nursery:
    """The nursery of this process for these imports; a dead one is replaced. Returns before its imports are done.

    This is process-wide on purpose: a second Trainer should not pay for the imports again.
    """
    key = tuple(preload)
    with _shared_lock:
        nursery = _shared.get(key)
        if nursery is None or not nursery.is_alive():
            if not _shared:
                atexit.register(close_nurseries)
            nursery = _shared[key] = Nursery(key)
        return nursery


def close_nurseries() -> None:
    """End every nursery of this process and, with it, every worker that is still there."""
    with _shared_lock:
        for nursery in _shared.values():
            nursery.close()
        _shared.clear()
