"""For scripts that save when they get SIGTERM, as torchrun sends it: they get it when the run is asked to end.

The worker's own handler tells the driver, which lets `should_stop()` become true. A script that has put another in its
place does not look at that.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.rank_session import Session
from paceline.session import current

LOOK_S = 0.2


@contextmanager
def passing_on_sigterm() -> Iterator[None]:
    """Does nothing outside of the main thread, where scripts can have no handler."""
    session = current()
    if session is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    ours, ended = signal.getsignal(signal.SIGTERM), threading.Event()
    watcher = threading.Thread(
        target=_watch, args=(session, ours, ended, os.getpid()), name="paceline-notice", daemon=True
    )
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        signal.signal(signal.SIGTERM, ours)


def _watch(session: Session, ours: object, ended: threading.Event, pid: int) -> None:
    while not ended.wait(LOOK_S):
        if session.is_stop_wanted:
            if signal.getsignal(signal.SIGTERM) is not ours:
                os.kill(pid, signal.SIGTERM)
            return
