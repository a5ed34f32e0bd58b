"""SIGTERM in a worker: a notice that it will be taken away, not its end."""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType


def on_sigterm(act: Callable[[], None]) -> None:
    """From now on, call `act` when this process gets SIGTERM. For the main thread.

    It is called in a thread of its own, since the signal may have come while this one was holding a lock. Processes
    that the user's function forks do not inherit it: they end, as who terminates them expects, also when the signal
    comes before they have run a single line.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        threading.Thread(target=act, name="paceline-sigterm", daemon=True).start()

    def hold() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def let_go() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def forget() -> None:
        if signal.getsignal(signal.SIGTERM) is handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        let_go()

    signal.signal(signal.SIGTERM, handle)
    os.register_at_fork(before=hold, after_in_parent=let_go, after_in_child=forget)
