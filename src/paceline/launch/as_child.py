"""In a worker: run any command as its child, with its environment and its output."""

import ctypes
import os
import select
import signal
import subprocess
import threading
import time

from paceline.launch.exit_code import check_exit_code, is_stop_wanted, tell_restart_count
from paceline.launch.program import Command, go_to

LOOK_S = 0.2
"""How often to see whether the run is asked to end."""

_PR_SET_PDEATHSIG = 1
_END_S = 5.0
"""How long this process may take to end, with its memory written to a file perhaps."""


def run_as_child(command: Command) -> None:
    """The worker ends as the command does: with an error if its exit code is not 0, and by the same signal if it was
    killed. When the run is asked to end, the command gets SIGTERM."""
    go_to(command.folder)
    tell_restart_count()
    libc = ctypes.CDLL(None)  # loaded here: between fork and exec, as little as possible is done

    def end_with_the_worker() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    with subprocess.Popen(command.words, stdin=subprocess.DEVNULL, preexec_fn=end_with_the_worker) as child:
        try:
            _wait(child)
        finally:
            child.kill()
    if child.returncode < 0:
        _end_by_signal(-child.returncode)
    else:
        check_exit_code(child.returncode, f"the command {command.__name__}")


def _wait(child: "subprocess.Popen[bytes]") -> None:
    """By the child's end itself, not by looking now and then: other ranks may fail of it, and the cause has to be known
    before them."""
    is_told = False
    pidfd = os.pidfd_open(child.pid)
    try:
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        while not poller.poll(LOOK_S * 1000):
            if not is_told and is_stop_wanted():
                is_told = True
                child.terminate()
    finally:
        os.close(pidfd)
    child.wait()


def _end_by_signal(number: int) -> None:
    """A killed command is a lost worker, and the run starts again. One that was told to end is none."""
    if is_stop_wanted():
        return
    if threading.current_thread() is not threading.main_thread():  # on Ray, where handlers cannot be taken away
        number = signal.SIGKILL
    elif number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    time.sleep(_END_S)
