"""SIGTERM in the driver, while a run goes on."""

import signal
import threading
from collections.abc import Callable


class Terminated(SystemExit):
    """Raised from the run when it has ended after SIGTERM, so that `finally` blocks and exit handlers still run."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


def on_sigterm(act: Callable[[], None]) -> Callable[[], None]:
    """Call `act` at the first SIGTERM; a second one does what it did before. Returns what puts that back at once.

    Does nothing outside the main thread, where Python does not allow it, and when the user has a handler: that one
    knows better, and may call `Trainer.stop()`. Ray's own handler, which exits, is none of the user's.
    """
    former = signal.getsignal(signal.SIGTERM)
    is_users = former is not signal.SIG_DFL and not getattr(former, "__module__", "").startswith("ray.")
    if is_users or threading.current_thread() is not threading.main_thread():
        return lambda: None

    def restore() -> None:
        if signal.getsignal(signal.SIGTERM) is handle:
            signal.signal(signal.SIGTERM, former)

    def handle(*_: object) -> None:
        restore()
        act()

    signal.signal(signal.SIGTERM, handle)
    return restore
