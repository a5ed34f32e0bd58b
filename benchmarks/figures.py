"""The outcome of a benchmark as values: figures of several systems, side by side in rows."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """One system's figure: the median of its samples, or the reason why there is none."""

    system: str
    samples: tuple[float, ...] = ()
    problem: str | None = None
    note: str = ""

    @property
    def value(self) -> float | None:
        return statistics.median(self.samples) if self.samples else None


@dataclass(frozen=True)
class Unit:
    """What a figure counts, and which way is better."""

    name: str
    scale: float = 1.0
    """The number shown is the value times this."""
    more_is_better: bool = False

    def show(self, value: float) -> str:
        return f"{self.number(value)} {self.name}"

    def number(self, value: float) -> str:
        shown = value * self.scale
        digits = 0 if abs(shown) >= 100 else 1 if abs(shown) >= 10 else 2
        return f"{shown:,.{digits}f}"


SECONDS = Unit("s")
MILLISECONDS = Unit("ms", 1e3)
MICROSECONDS = Unit("µs", 1e6)
PER_SECOND = Unit("/s", more_is_better=True)
PER_MINUTE = Unit("/min", 60, more_is_better=True)


@dataclass(frozen=True)
class Row:
    """One line of the table. A target is judged by the medians; a row without one is there for information."""

    what: str
    unit: Unit
    ours: Figure
    peers: tuple[Figure, ...] = ()
    target: str = ""
    is_met: bool | None = None
    note: str = ""
    has_ratios: bool = True

    def ratio(self, peer: Figure) -> float | None:
        return ratio(self.unit, self.ours, peer) if self.has_ratios else None


def ratio(unit: Unit, ours: Figure, peer: Figure) -> float | None:
    """How many times better we are: above 1, we are ahead."""
    if not ours.value or not peer.value:
        return None
    return ours.value / peer.value if unit.more_is_better else peer.value / ours.value


def judged(figure: Figure, is_good: Callable[[float], bool]) -> bool | None:
    return None if figure.value is None else is_good(figure.value)


def ratio_at_least(unit: Unit, ours: Figure, peer: Figure, least: float) -> bool | None:
    """None when one of both is missing: then nothing can be said."""
    found = ratio(unit, ours, peer)
    return None if found is None else found >= least


def failed_row(what: str, error: Exception) -> Row:
    return Row(what, SECONDS, Figure("Paceline", problem=f"{type(error).__name__}: {error}"))
