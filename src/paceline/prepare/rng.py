"""The random generators of this process as values: derive a seed, take states, put them back, lend them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy  # noqa: F401 - datasets and samplers draw from it: it has to be there to be seeded
import torch

from paceline.errors import ArgumentError
from paceline.frameworks import generators


def seed_generators(seed: int, own: Sequence[torch.Generator] = ()) -> None:
    """Seed the global generators and some of the user's own. CUDA is left alone: loading data does not use it."""
    generators.seed(seed)
    for generator in own:
        generator.manual_seed(seed)


def generator_states(own: Sequence[torch.Generator] = ()) -> dict[str, Any]:
    states = generators.states()
    if own:
        states["generators"] = [generator.get_state() for generator in own]
    return states


def restore_generators(states: dict[str, Any], own: Sequence[torch.Generator] = ()) -> None:
    generators.restore(states)
    for generator, state in zip(own, states.get("generators", ()), strict=True):
        generator.set_state(state)


def check_seed(seed: Any) -> int:
    """What every framework's generators take."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ArgumentError(f"seed={seed!r}; expected an integer from 0 to 2**63 - 1.")
    return seed


class RandomStream:
    """A random sequence of its own for code that only knows the global generators.

    Inside `lent()` the global generators (and those handed in) continue this stream; outside it they are as
    if nothing had been drawn. So an order can be drawn piece by piece while the training code draws its own
    numbers in between.
    """

    def __init__(self, seed: int, generators: Sequence[torch.Generator] = ()):
        self._seed, self._generators = seed, generators
        self._states: dict[str, Any] | None = None

    @contextmanager
    def lent(self) -> Iterator[None]:
        outside = generator_states(self._generators)
        if self._states is None:
            seed_generators(self._seed, self._generators)
        else:
            restore_generators(self._states, self._generators)
        try:
            yield
        finally:
            self._states = generator_states(self._generators)
            restore_generators(outside, self._generators)
