"""The driver's handle on the nursery: a process with the framework imported, from which workers are forked.

Starting a process and importing torch takes seconds, forking one that has it takes milliseconds. A nursery is started
in the background as soon as a Trainer exists, and serves every Trainer of this process that wants the same imports.
"""

import atexit
import contextlib
import itertools
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

from paceline.errors import WorkerStartError
from paceline.workers import surroundings

_START = """
import sys
fd, driver_pid, end_of_path = map(int, sys.argv[1:4])
sys.path[:] = sys.argv[4:end_of_path]
from paceline.workers.nursery_process import main
main(fd, driver_pid, sys.argv[end_of_path:])
"""
"""The path comes before the first import: `-c` would look into the working directory, where the driver may not."""

_MESSAGE_BYTES = 1 << 16


class Nursery:
    """One nursery process. Thread-safe: requests are answered one at a time.

    Whoever asks may be interrupted at any line, by Ctrl-C, say. A message is a packet, which is sent whole or not at
    all; it has a number, and an answer to a question that nobody asks any more is dropped.

    `import_s` is how long one module may take to import, `answer_s` how long it may then take to answer. A nursery that
    takes longer is killed.
    """

    def __init__(self, preload: Sequence[str], import_s: float = 300.0, answer_s: float = 30.0):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = [entry for entry in sys.path if isinstance(entry, str)]
        theirs.setblocking(True)  # whatever socket.setdefaulttimeout says here
        with theirs:
            numbers = map(str, (theirs.fileno(), os.getpid(), 4 + len(path)))
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, *numbers, *path, *preload],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                cwd=surroundings.cwd() or os.sep,  # in a directory that was removed, Python may not start
            )
        self._control = ours
        self._import_s, self._answer_s = import_s, answer_s
        self._importing: str | None = "Python itself"
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._owner_pid = os.getpid()

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_alive(self) -> bool:
        """False in a fork of the driver too: the socket belongs to the parent."""
        return self._owner_pid == os.getpid() and self._process.poll() is None

    def new_number(self) -> int:
        """For a worker that is to be forked. Take it first: by it, `end` finds whatever an interrupted `fork` made."""
        return next(self._numbers)

    def fork(self, number: int, fds: tuple[int, ...], scratch_dir: str) -> int:
        """Fork a worker with its ends of its connections: over the first it is told what else it has to know. Returns
        its pid. Waits for the imports when they are not done. `scratch_dir` is removed when the driver dies."""
        try:
            pid: int | str = self._ask("fork", number, scratch_dir, fds=fds)
        except TimeoutError as error:
            raise WorkerStartError(f"The process that forks workers (pid {self.pid}) {error}") from error
        except (EOFError, OSError) as error:
            raise WorkerStartError(
                f"The process that forks workers (pid {self.pid}) ended while workers were being started"
                f" ({error}). Its own error, if any, is above; the usual causes are memory running out and"
                " a framework that fails to import."
            ) from error
        if isinstance(pid, str):
            raise WorkerStartError(f"A worker could not be forked: {pid}.")
        return pid

    def end(self, number: int) -> int | None:
        """The wait status of a worker that has ended, and the end of whatever it has started and left. One that has not
        ended is killed. None when there is no such worker, or nobody knows any more."""
        try:
            status: int | None = self._ask("end", number)
        except (EOFError, OSError):
            return None
        except BaseException:
            self.end_unseen(number)
            raise
        return status

    def end_unseen(self, number: int) -> None:
        """The same without waiting, after an interrupt: the imports may not be done yet."""
        with contextlib.suppress(OSError):
            self._send((self.new_number(), "end", number))

    def close(self) -> None:
        if self._owner_pid != os.getpid():
            self._control.close()
            return
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)  # closing is not enough if a child of ours has inherited it
        self._control.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
            return
        self._kill()

    def _kill(self) -> None:
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel: it ends when it comes out
            self._process.wait(timeout=5)

    def _ask(self, verb: str, *args: Any, fds: Sequence[int] = ()) -> Any:
        """TimeoutError, and the end of the nursery, if it does not answer; EOFError or OSError if it has ended."""
        with self._lock:
            number = next(self._numbers)
            try:
                self._send((number, verb, *args), fds)
                while True:
                    answered, value = self._receive()
                    self._importing = value if answered == 0 else None
                    if answered == number:
                        return value
            except TimeoutError:
                self._kill()
                raise TimeoutError(self._silence()) from None

    def _send(self, message: tuple[Any, ...], fds: Sequence[int] = ()) -> None:
        self._control.settimeout(self._answer_s)
        socket.send_fds(self._control, [pickle.dumps(message)], fds)

    def _receive(self) -> tuple[int, Any]:
        self._control.settimeout(self._answer_s if self._importing is None else self._import_s)
        packet = self._control.recv(_MESSAGE_BYTES)
        if not packet:
            raise EOFError("it closed the connection")
        message: tuple[int, Any] = pickle.loads(packet)
        return message

    def _silence(self) -> str:
        if self._importing is None:
            return (
                f"did not answer within {self._answer_s:g} s and was ended. It may have been stopped, or the machine "
                "has no memory left. The next start begins with a new one."
            )
        return (
            f"was still importing {self._importing} after {self._import_s:g} s and was ended. See whether that import "
            "ends in a Python of its own. What waits for something when it is imported cannot be preloaded."
        )


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
            if nursery is not None:
                nursery.close()
            nursery = _shared[key] = Nursery(key)
        return nursery


def close_nurseries() -> None:
    """End every nursery of this process and, with it, every worker that is still there."""
    with _shared_lock:
        for nursery in _shared.values():
            nursery.close()
        _shared.clear()
