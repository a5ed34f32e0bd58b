"""The random generators of this process: python's own, and the global one of each framework that it has imported."""

import random
from typing import Any

from paceline.frameworks import every, loaded


def reseed() -> None:
    """A fork repeats its parent's random numbers; a process that was started fresh would not."""
    random.seed()
    for framework in loaded():
        framework.reseed()


def seed(seed: int) -> None:
    """The generators of the CPU; what is imported later has seeds of its own."""
    random.seed(seed)
    for framework in loaded():
        framework.seed(seed)


def states() -> dict[str, Any]:
    """By the name of the framework, and "python", as values that a checkpoint holds."""
    found = {framework.name: framework.rng_state() for framework in loaded()}
    return {"python": random.getstate(), **{name: state for name, state in found.items() if state is not None}}


def restore(states: dict[str, Any]) -> None:
    """Imports the frameworks whose states are there. Takes lists where tuples were saved: a stored state may come back
    with either."""
    version, internal, gauss_next = states["python"]
    random.setstate((version, tuple(internal), gauss_next))
    for framework in every():
        if framework.name in states:
            framework.set_rng_state(states[framework.name])
