"""The end of a script that runs in a worker: what Python does when a program ends, since the process goes on.

Exit handlers that were there before belong to the worker's process, or to Ray: they are not the script's to call.
"""

import atexit
import multiprocessing
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Any, NoReturn


class Left(SystemExit):
    """The script has called `os._exit`: nothing of what Python does at the end is done."""


@contextmanager
def as_of_a_program() -> Iterator[None]:
    """What is registered with `atexit` inside is called at the end. If the script has not failed, its threads and
    processes that are no daemons are waited for before. A fork of this process that comes here has neither."""
    owner, threads_before = os.getpid(), set(threading.enumerate())
    with _ExitHandlers(), _leaving_alive():
        yield
        if os.getpid() == owner:
            _wait_for_others(threads_before)


@contextmanager
def _leaving_alive() -> Iterator[None]:
    """Inside, `os._exit` of this thread raises Left. By itself it would be the end of a worker, which is a loss."""
    original, owner, caller = os._exit, os.getpid(), threading.current_thread()

    def leave(status: int) -> NoReturn:
        if os.getpid() == owner and threading.current_thread() is caller:
            raise Left(status)
        original(status)

    os._exit = leave
    try:
        yield
    finally:
        os._exit = original


def _wait_for_others(threads_before: set[threading.Thread]) -> None:
    while threads := [one for one in set(threading.enumerate()) - threads_before if _is_waited_for(one)]:
        for thread in threads:
            if (executor := _executor_of(thread)) is not None:
                executor.shutdown()  # its threads wait for work: Python tells them that there will be no more
        for thread in threads:
            thread.join()
    for child in multiprocessing.active_children():
        if not child.daemon:
            child.join()


def _is_waited_for(thread: threading.Thread) -> bool:
    return not thread.daemon and thread is not threading.current_thread()


def _executor_of(thread: threading.Thread) -> Executor | None:
    """Whose thread it is, if it is one of `concurrent.futures`. These know it by a weak reference; what they offer for
    the end of a program would end executors of the worker's own as well."""
    reference = getattr(thread, "executor_reference", None) or next(iter(getattr(thread, "_args", None) or ()), None)
    found = reference() if isinstance(reference, weakref.ref) else None
    return found if isinstance(found, Executor) else None


class _ExitHandlers:
    """Stands in for `atexit`, as packages use it: by the module. Whoever took `register` out of it before is not
    seen."""

    def __init__(self) -> None:
        self._handlers: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []

    def register(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        self._handlers.append((fn, args, kwargs))
        return fn

    def unregister(self, fn: Callable[..., Any], /) -> None:
        self._handlers = [one for one in self._handlers if one[0] != fn]
        self._former[1](fn)

    def __enter__(self) -> None:
        self._former = atexit.register, atexit.unregister
        atexit.register, atexit.unregister = self.register, self.unregister  # type: ignore[assignment]

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        """The last one first; a handler may register another. One that fails does not keep the others from it."""
        try:
            while self._handlers and kind is not Left:
                fn, args, kwargs = self._handlers.pop()
                try:
                    fn(*args, **kwargs)
                except Exception:
                    sys.excepthook(*sys.exc_info())
        finally:
            atexit.register, atexit.unregister = self._former
