"""SIGTERM in a worker: a notice that it will be taken away, not its end."""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType


def on_sigterm(act: Callable[[], None]) -> None:
    """From now on, call `act` when this process gets SIGTERM. For the main thread.

    It is called in a thread of its own, since the signal may have come while this one was holding a lock. Processes
    that the user's function forks inherit the handler, but not the role: they end, as who terminates them expects.
    """
    owner = os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getpid() == owner:
            threading.Thread(target=act, name="paceline-sigterm", daemon=True).start()
        else:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, handle)
