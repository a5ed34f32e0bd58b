"""Named stages with their times, and the line that an epoch leaves."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from numbers import Real
from typing import Any


class Stages:
    """Times of an epoch's stages, by name. A stage that comes twice is added up."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin

    def taken(self) -> dict[str, float]:
        """Of the epoch that ends: the next one begins with none."""
        taken, self.seconds = self.seconds, {}
        return taken


def epoch_line(
    epoch: int,
    num_epochs: int,
    values: Mapping[str, Any],
    seconds: Mapping[str, float],
    formats: Mapping[str, str],
) -> str:
    """`epoch 3/10 | train 1.2 s | loss 0.1234`. `formats` has a format for each glob of names; "" leaves values out."""
    parts = [f"epoch {epoch + 1}/{num_epochs}", *(f"{name} {taken:.1f} s" for name, taken in seconds.items())]
    for name, value in values.items():
        form = next((form for glob, form in formats.items() if fnmatchcase(name, glob)), ".4g")
        if form and name not in ("epoch", "batch") and isinstance(value, Real):
            parts.append(f"{name} {value:{form}}")
    return " | ".join(parts)
