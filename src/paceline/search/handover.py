"""Two lives of one trial may overlap: Tune goes on with a paused trial in one process while the process that had it
before still holds its run folder, idle, and is not told.

So whoever wants the folder leaves a request in it, and whoever holds it watches out for one.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

from paceline.errors import TrainerStateError
from paceline.runs import RunFolder

REQUEST_FILE = "handover"
PATIENCE_S = 15.0
LOOK_S = 0.1


def claim(run_dir: Path, patience_s: float = PATIENCE_S) -> RunFolder | None:
    """Reopen the folder, after asking its present driver for it; None if that does not let go in time."""
    request = run_dir / REQUEST_FILE
    deadline = time.monotonic() + patience_s
    try:
        while True:
            with contextlib.suppress(TrainerStateError):
                return RunFolder.reopen(run_dir)
            if time.monotonic() >= deadline:
                return None
            request.touch()
            time.sleep(LOOK_S / 4)
    finally:
        request.unlink(missing_ok=True)


class Watch:
    """Calls `let_go` once, from a thread of its own, when somebody asks for the folder and `let_go` returns True."""

    def __init__(self, run_dir: Path, let_go: Callable[[], bool]):
        self._request = run_dir / REQUEST_FILE
        self._let_go = let_go
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="paceline-handover", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _loop(self) -> None:
        while not self._stopped.wait(LOOK_S):
            if self._request.exists() and self._let_go():
                return
