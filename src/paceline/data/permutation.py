"""Shuffling without an array: a bijection of range(n) that is computed where it is asked for."""

from functools import cached_property
from typing import Any

import numpy as np

from paceline.data.seeds import derived_seed

_SMALL = 1 << 16
"""Up to here the permutation is drawn and kept: it takes less than a megabyte, and is as random as numpy's."""
_NUM_ROUNDS = 6
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Permutation:
    """Slot → item. A large one is a Feistel network over the least power of four that holds n, walked until it lands
    below n: seeking costs microseconds, and there is nothing to keep, however large n is."""

    def __init__(self, size: int, *key: int | str):
        self.size, self._key = size, key
        self._half = max(1, ((max(size, 2) - 1).bit_length() + 1) // 2)

    def __call__(self, slots: Any) -> Any:
        """The items at these slots, each of which is in range(size)."""
        slots = np.asarray(slots, dtype=np.int64)
        if self.size <= _SMALL:
            return self._drawn[slots]
        items = self._encrypt(np.atleast_1d(slots).astype(np.uint64))  # of arrays, numpy lets products wrap around
        while (outside := items >= self.size).any():
            items[outside] = self._encrypt(items[outside])
        return items.astype(np.int64).reshape(slots.shape)

    @cached_property
    def _drawn(self) -> Any:
        return np.random.Generator(np.random.Philox(derived_seed(*self._key))).permutation(self.size)

    @cached_property
    def _round_keys(self) -> list[Any]:
        return [np.uint64(derived_seed("round", number, *self._key)) for number in range(_NUM_ROUNDS)]

    def _encrypt(self, values: Any) -> Any:
        half = np.uint64(self._half)
        mask = np.uint64((1 << self._half) - 1)
        left, right = values >> half, values & mask
        for key in self._round_keys:
            left, right = right, left ^ (_mixed(right, key) & mask)
        return (left << half) | right


def _mixed(values: Any, key: Any) -> Any:
    """The finalizer of splitmix64: each bit of the input changes half of the output's."""
    mixed = (values + key) * _GOLDEN
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def scrambled(values: Any, *key: int | str) -> Any:
    """Each number as another one of 63 bits, which looks random and is always the same."""
    mixed = _mixed(np.asarray(values, dtype=np.int64).astype(np.uint64), np.uint64(derived_seed(*key)))
    return (mixed >> np.uint64(1)).astype(np.int64)
