"""How long named parts of a step take. Cheap: two readings of a clock for each."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any


class Clock:
    """Seconds by name, since the last `take`. What is measured inside another part is not counted there again."""

    def __init__(self, sync: Callable[[], None] | None = None, now: Callable[[], float] = time.perf_counter):
        """`sync` waits for work that was only begun, on a GPU, before a clock is read."""
        self._sync, self._now = sync, now
        self._measured: deque[tuple[str | None, float]] = deque()
        """Parts and their seconds, None for a step. Another thread may take them: each goes in and out by itself."""
        self._inner: list[float] = []
        """Of the parts that are open, how long those inside them took."""

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        begin = self._read()
        self._inner.append(0.0)
        try:
            yield
        finally:
            elapsed = self._read() - begin
            inside = self._inner.pop()
            if self._inner:
                self._inner[-1] += elapsed
            self._measured.append((name, elapsed - inside))

    def timed(self, name: str, items: Iterable[Any]) -> Iterator[Any]:
        """The items, and how long each was waited for."""
        iterator = iter(items)
        while True:
            with self.section(name):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item

    def step(self) -> None:
        self._measured.append((None, 0.0))

    def take(self) -> tuple[dict[str, float], int]:
        """Seconds by name, and steps, since the last time."""
        sums: dict[str, float] = {}
        num_steps = 0
        while self._measured:
            name, seconds = self._measured.popleft()
            if name is None:
                num_steps += 1
            else:
                sums[name] = sums.get(name, 0.0) + seconds
        return sums, num_steps

    def _read(self) -> float:
        if self._sync is not None:
            self._sync()
        return self._now()


def section(clock: Clock | None, name: str) -> AbstractContextManager[None]:
    """Of a clock that may be off, which costs nothing then."""
    return _OFF if clock is None else clock.section(name)


_OFF = nullcontext()
