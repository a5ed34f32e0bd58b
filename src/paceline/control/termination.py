"""Ctrl-C and SIGTERM in the driver, from before a run has a folder until it has ended.

    the first of them       is noted: the run asks the function to save and return, for a while. While workers start, it
                            is raised: there is nothing to save
    another Ctrl-C          ends the run at once
    another SIGTERM         does what it would do without us

Python raises KeyboardInterrupt on whatever line it hits: a run would be left as it happens to be, and a lock held for
ever. Here it is raised in code of the user's, and while workers start; elsewhere the run asks whether it has come.
"""

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from paceline.control.attempt import Wish

_PATIENCE = 5
"""Ctrl-C is raised all the same, wherever it is, when it has been held back so often: something of ours must hang."""


class Terminated(SystemExit):
    """Raised from the run when it has ended after SIGTERM, so that `finally` blocks and exit handlers still run."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


class Signals:
    """What has come since `watch`. Nothing is watched outside the main thread, where Python does not allow it, nor what
    the user has a handler for: that one knows better, and may call `Trainer.stop()`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, settle_s: float = 0.0):
        """Within `settle_s` of a signal, another is its echo: of a launcher, which passes on what all had anyway."""
        self.wish: Wish | None = None
        self.on_wish: Callable[[], None] = lambda: None
        """Called in the signal handler, so wherever the main thread happens to be."""
        self._clock, self._settle_s = clock, settle_s
        self._former: dict[int, Any] = {}
        self._num_interrupts = 0
        self._limit: float = _PATIENCE
        self._owner_pid = os.getpid()

    def watch(self) -> None:
        """From now on, until `release`; again when somebody else may have put a handler in the place of ours."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, is_free in ((signal.SIGINT, _raises_interrupt), (signal.SIGTERM, _is_nobodys)):
            former = signal.getsignal(number)
            is_used_up = number == signal.SIGTERM and self.wish is not None and self.wish.kind == "terminate"
            if is_free(former) and not is_used_up:
                self._former[number] = former
                signal.signal(number, self._handle)

    def only_note(self) -> None:
        """The run is being closed: from now on signals are noted, and `on_wish` is not called."""
        self.on_wish = lambda: None

    @contextmanager
    def watching(self) -> "Iterator[Signals]":
        """Begin to watch. Whoever is handed this releases it; if nobody is because something fails, it is done here."""
        try:
            self.watch()
            yield self
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Everything is as it was before. Idempotent. Ctrl-C comes last: until then ours has it, which raises nothing
        any more, so that it cannot keep the others from being put back."""
        self._limit = math.inf
        for number in reversed(list(self._former)):
            self._put_back(number)

    def _put_back(self, number: int) -> None:
        if number in self._former and signal.getsignal(number) == self._handle:
            signal.signal(number, self._former[number])
        self._former.pop(number, None)

    def is_urgent(self) -> bool:
        """Whether Ctrl-C has come more than once."""
        return self._num_interrupts > 1

    def check(self, nth: int = 2) -> None:
        """Raises KeyboardInterrupt if Ctrl-C has come so often; with 1, also Terminated after SIGTERM."""
        if nth == 1 and self.wish is not None and self.wish.kind == "terminate":
            raise Terminated
        if self._num_interrupts >= nth:
            raise KeyboardInterrupt

    def raising(self, nth: int = 2) -> "_Raising":
        """Inside, the n-th Ctrl-C of the run, or a later one that is new, is raised where it hits; once, so that what
        follows from it can be done in peace. With 1, SIGTERM is too."""
        return _Raising(self, nth)

    def _handle(self, number: int, frame: object) -> None:
        if self._owner_pid != os.getpid():  # a fork, which has nothing to do with the run
            self._put_back(number)
            signal.raise_signal(number)
            return
        if self.wish is not None and self._clock() - self.wish.at < self._settle_s:
            return
        if number == signal.SIGTERM:
            is_again = self.wish is not None and self.wish.kind == "terminate"
            if is_again or not self._settle_s:
                self._put_back(number)
            if is_again:
                signal.raise_signal(number)
                return
            self._note(Wish("terminate", self._clock()))
            if self._limit == 1:
                raise Terminated
            return
        self._num_interrupts += 1
        if self._num_interrupts >= self._limit:
            self._limit = self._num_interrupts + _PATIENCE
            raise KeyboardInterrupt
        if self.wish is None:
            self._note(Wish("interrupt", self._clock()))

    def _note(self, wish: Wish) -> None:
        self.wish = wish
        self.on_wish()


class _Raising:
    """Around every step and every callback: a generator would cost a few microseconds more."""

    __slots__ = ("_former", "_nth", "_signals")

    def __init__(self, signals: Signals, nth: int):
        self._signals, self._nth = signals, nth

    def __enter__(self) -> None:
        signals = self._signals
        self._former, signals._limit = signals._limit, max(self._nth, signals._num_interrupts + 1)

    def __exit__(self, *raised: object) -> None:
        signals = self._signals
        signals._limit = max(self._former, signals._num_interrupts + 1)


def _raises_interrupt(handler: object) -> bool:
    """Ray Tune never takes its own away: it would swallow the first Ctrl-C of every run after a search."""
    return handler is signal.default_int_handler or _is_rays(handler)


def _is_nobodys(handler: object) -> bool:
    return handler is signal.SIG_DFL or _is_rays(handler)


def _is_rays(handler: object) -> bool:
    """One that Ray has put there for itself is none of the user's."""
    return str(getattr(handler, "__module__", "")).startswith("ray.")
