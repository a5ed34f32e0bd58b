"""A worker's questions to the driver that are not answered yet."""

import itertools
import queue
import threading
from collections.abc import Callable
from typing import Any


class Questions:
    """Pairs answers with the threads that wait for them. Thread-safe. They wait at a queue of C: a Future takes three
    times as long to wake who waits for it."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._open: dict[int, queue.SimpleQueue[Any]] = {}
        self._lock = threading.RLock()  # a signal handler may ask too

    def ask(self, send: Callable[[int], None], timeout_s: float | None = None) -> Any:
        """Send the question with its number and wait; an exception as the answer is raised, TimeoutError if there is
        none in time."""
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        number = next(self._numbers)
        with self._lock:
            self._open[number] = answers
        send(number)
        try:
            value = answers.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(f"no answer within {timeout_s:g} s") from None
        finally:
            with self._lock:
                self._open.pop(number, None)
        return answered(value)

    def answer(self, number: int, value: Any) -> None:
        with self._lock:
            answers = self._open.pop(number, None)
        if answers is not None:
            answers.put(value)

    def abandon(self, error: BaseException) -> None:
        """Nobody will answer: everybody who waits gets this error instead."""
        with self._lock:
            numbers = list(self._open)
        for number in numbers:
            self.answer(number, error)


def answered(value: Any) -> Any:
    """An exception as the answer is raised where the question was asked."""
    if isinstance(value, BaseException):
        raise value
    return value
