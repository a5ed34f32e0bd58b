"""Measures a part of a training, in the background, and says what it has found."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from paceline import session
from paceline.errors import ArgumentError
from paceline.profiling.clock import Clock
from paceline.profiling.system import System
from paceline.profiling.verdict import Verdict, judge

_MOST_SAMPLES = 4096
KIND = "profile"
"""Of the lines in events.jsonl."""


@contextmanager
def profile(every_s: float = 1.0, *, trace_dir: str | Path | None = None, sync: bool = True) -> Iterator[Profiler]:
    """Inside the block, name the parts of a step, and count steps:

    >>> with paceline.profile() as profiler:
    ...     for batch in profiler.timed("dataloader", loader):
    ...         with profiler.section("forward"):
    ...             loss = model(batch)
    ...         profiler.step()
    >>> print(profiler.verdict())

    Every `every_s` seconds the parts' times and a sample of the machine go to the run's events.jsonl, as "profile".

    Args:
        trace_dir: also record a trace of torch's own profiler there, which TensorBoard and Chrome show.
        sync: wait for the GPU at both ends of a part, so that it is charged for its own work.
    """
    if not every_s >= 0.1:
        raise ArgumentError(f"profile(every_s={every_s!r}): expected at least 0.1 s between samples.")
    profiler = Profiler(every_s, _sync() if sync else None)
    with _trace(trace_dir):
        profiler.start()
        try:
            yield profiler
        finally:
            profiler.stop()


class Profiler:
    """What `profile()` gives. `start` and `stop` are for loops that measure some of their steps."""

    def __init__(self, every_s: float = 1.0, sync: Callable[[], None] | None = None):
        self.clock = Clock(sync)
        self._every_s = every_s
        self._sums: dict[str, float] = {}
        self._num_steps, self._elapsed_s, self._begin = 0, 0.0, 0.0
        self.samples: list[dict[str, Any]] = []
        """One for each `every_s`: the times of parts, and the machine. In a long training some of them, evenly; the run
        folder has all."""
        self._num_sampled, self._stride = 0, 1
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def section(self, name: str) -> AbstractContextManager[None]:
        return self.clock.section(name)

    def timed(self, name: str, items: Iterable[Any]) -> Iterator[Any]:
        return self.clock.timed(name, items)

    def step(self) -> None:
        self.clock.step()

    @property
    def is_running(self) -> bool:
        return self._thread is not None

    def start(self) -> None:
        self._system, self._begin = System(), time.monotonic()
        self.clock.take()
        self._is_over.clear()
        self._thread = threading.Thread(target=self._watch, name="paceline-profile", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Idempotent."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._is_over.set()
        thread.join()
        self._sample()
        self._elapsed_s += time.monotonic() - self._begin

    def verdict(self) -> Verdict:
        """Of all that was measured so far."""
        running = time.monotonic() - self._begin if self.is_running else 0.0
        return judge(self._sums, self._num_steps, self._elapsed_s + running, self.samples)

    def _watch(self) -> None:
        while not self._is_over.wait(self._every_s):
            self._sample()

    def _sample(self) -> None:
        sums, num_steps = self.clock.take()
        for name, seconds in sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + seconds
        self._num_steps += num_steps
        sample = {"steps": num_steps, "parts_s": sums, **self._system.sample()}
        self._keep(sample)
        session.note(KIND, **sample)

    def _keep(self, sample: dict[str, Any]) -> None:
        if self._num_sampled % self._stride == 0:
            self.samples.append(sample)
        self._num_sampled += 1
        if len(self.samples) > _MOST_SAMPLES:
            del self.samples[1::2]
            self._stride *= 2


def _sync() -> Callable[[], None] | None:
    import sys

    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    synchronize: Callable[[], None] = torch.cuda.synchronize
    return synchronize


@contextmanager
def _trace(trace_dir: str | Path | None) -> Iterator[None]:
    if trace_dir is None:
        yield
        return
    from paceline.profiling.torch_trace import traced

    with traced(Path(trace_dir)):
        yield
