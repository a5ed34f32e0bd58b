"""The random generators of this process as values: derive a seed, take states, put them back, lend them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import numpy as np
import torch


def derived_seed(*parts: int | str) -> int:
    """A seed of 63 bits. Neighbouring parts give unrelated seeds, which adding numbers would not."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "big") >> 1


def seed_generators(seed: int, generators: Sequence[torch.Generator] = ()) -> None:
    """Seed python, numpy and torch's CPU generator. CUDA is left alone: loading data does not use it."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    for generator in (torch.default_generator, *generators):
        generator.manual_seed(seed)


def generator_states(generators: Sequence[torch.Generator] = ()) -> dict[str, Any]:
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if generators:
        states["generators"] = [generator.get_state() for generator in generators]
    return states


def restore_generators(states: dict[str, Any], generators: Sequence[torch.Generator] = ()) -> None:
    """Takes lists where tuples were saved: a stored state may come back with either."""
    version, internal, gauss_next = states["python"]
    random.setstate((version, tuple(internal), gauss_next))
    np.random.set_state(tuple(states["numpy"]))
    torch.set_rng_state(states["torch"])
    for generator, state in zip(generators, states.get("generators", ()), strict=True):
        generator.set_state(state)


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
