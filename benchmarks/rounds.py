"""Measure several systems in turns: what changes on the machine meanwhile then befalls all of them alike."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from benchmarks.figures import Figure
from benchmarks.processes import MeasurementError
from benchmarks.systems import System

Measure = Callable[[System], Iterable[float]]
"""One round of one system: its samples."""


@dataclass(frozen=True)
class Effort:
    """How often things are done."""

    num_rounds: int = 5
    num_slow_rounds: int = 2
    is_quick: bool = False

    def rounds_of(self, system: System) -> int:
        return self.num_slow_rounds if system.is_slow else self.num_rounds


FULL, QUICK = Effort(), Effort(1, 1, is_quick=True)


def in_turns(systems: Iterable[System], measure: Measure, effort: Effort, say: Callable[[str], None]) -> list[Figure]:
    """The figures in the order of the systems. One that fails is not tried again, and its figure says why."""
    systems = list(systems)
    samples: dict[str, list[float]] = {system.name: [] for system in systems}
    problems: dict[str, str] = {}
    for number in range(max(effort.rounds_of(system) for system in systems)):
        for system in systems:
            if number >= effort.rounds_of(system) or system.name in problems:
                continue
            say(f"{system.name}, round {number + 1} of {effort.rounds_of(system)}")
            try:
                samples[system.name].extend(measure(system))
            except (MeasurementError, ValueError) as error:
                problems[system.name] = str(error)
    return [Figure(system.name, tuple(samples[system.name]), problems.get(system.name)) for system in systems]
