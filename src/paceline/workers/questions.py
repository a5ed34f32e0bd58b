"""A worker's questions to the driver that are not answered yet."""

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class Questions:
    """Pairs answers with the threads that wait for them. Thread-safe."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._open: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()

    def ask(self, send: Callable[[int], None], timeout_s: float | None = None) -> Any:
        """Send the question with its number and wait; an exception as the answer is raised, TimeoutError if there is
        none in time."""
        future: Future[Any] = Future()
        with self._lock:
            number = next(self._numbers)
            self._open[number] = future
        send(number)
        try:
            return future.result(timeout_s)
        finally:
            with self._lock:
                self._open.pop(number, None)

    def answer(self, number: int, value: Any) -> None:
        with self._lock:
            future = self._open.pop(number, None)
        if future is not None:
            settle(future, value)

    def abandon(self, error: BaseException) -> None:
        """Nobody will answer: everybody who waits gets this error instead."""
        with self._lock:
            numbers = list(self._open)
        for number in numbers:
            self.answer(number, error)


def settle(future: Future[Any], value: Any) -> None:
    """An exception as the answer is raised where it is waited for."""
    if isinstance(value, BaseException):
        future.set_exception(value)
    else:
        future.set_result(value)
