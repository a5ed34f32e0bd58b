"""Threads that read ahead for one loop, and end with it."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from typing import Any

logger = logging.getLogger(__name__)

LEAVE_S = 5.0
"""For so long, whoever leaves a loop waits for what its threads are in the middle of."""

_Work = queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


class Readers(Executor):
    """A pool of threads that is waited for with a bound, when its loop is left and when the interpreter ends. Python's
    own pool waits for ever in both cases: a function of the user's that never returns would hold up the whole program.
    Here its thread is left behind, as a daemon, and ends when the function returns.
    """

    def __init__(self, num_threads: int, name: str, wake: Callable[[], None] = lambda: None):
        """`wake` is called when it is over: it frees a thread that waits for somebody to take what it has made."""
        self._num_threads, self._name = num_threads, name
        self._work: _Work = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self.is_over = threading.Event()
        # Also at the interpreter's end, if somebody still holds on to a loop: a daemon that comes back from Arrow's
        # code when Python is being taken down around it can crash the process.
        self._end = weakref.finalize(self, _end, self._work, self.is_over, self._threads, wake, os.getpid())

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """When it is over, what comes is cancelled: a thread that was left behind may still ask."""
        future: Future[Any] = Future()
        if self.is_over.is_set():
            future.cancel()
            return future
        self._work.put((future, lambda: fn(*args, **kwargs)))
        if len(self._threads) < self._num_threads:
            name = f"{self._name}_{len(self._threads)}"
            thread = threading.Thread(target=_serve, args=(self._work,), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Waits for a while, and cancels what has not begun, whatever is asked. Idempotent."""
        self._end()


def _serve(work: _Work) -> None:
    while (task := work.get()) is not None:
        future, act = task
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(act())
            except BaseException as error:
                future.set_exception(error)
        del task, future, act  # while it waits for the next one, it keeps no rows alive


def _end(
    work: _Work, is_over: threading.Event, threads: Sequence[threading.Thread], wake: Callable[[], None], owner: int
) -> None:
    if os.getpid() != owner:  # after a fork: the threads are not here, and may hold for ever what was locked then
        return
    is_over.set()
    wake()
    with suppress(queue.Empty):
        while (task := work.get_nowait()) is not None:
            task[0].cancel()
    for _ in threads:
        work.put(None)
    deadline = time.monotonic() + LEAVE_S
    others = [thread for thread in threads if thread is not threading.current_thread()]  # garbage is collected anywhere
    for thread in others:
        thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_alive() for thread in others):
        logger.warning(
            "A loop over data was left, and what it reads or makes ahead has not come to an end in %g s: a function "
            "given to .map() or .filter() does not return, or storage does not answer. Its thread is left behind.",
            LEAVE_S,
        )
