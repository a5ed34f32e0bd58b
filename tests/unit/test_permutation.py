"""Shuffling without an array."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.data.permutation import Permutation, scrambled


@pytest.mark.parametrize("size", [0, 1, 2, 3, 100, 65_536, 65_537, 70_001, 300_000])
def test_every_item_has_one_slot(size):
    items = Permutation(size, "key", 1)(np.arange(size))
    assert np.array_equal(np.sort(items), np.arange(size))


@given(st.integers(1, 10**12), st.integers(0, 2**31), st.data())
def test_any_slot_is_found_alone(size, key, data):
    """Also of a thousand billion: nothing is as long as that."""
    start = data.draw(st.integers(0, size - 1))
    slots = np.arange(start, min(size, start + 50))
    order = Permutation(size, key)
    if size > 10**6 or size <= 65_536:
        together = order(slots)
        assert together.min() >= 0
        assert together.max() < size
        assert [int(order(slot)) for slot in slots[:5]] == together[:5].tolist()
        assert len(set(together.tolist())) == len(slots)


@pytest.mark.parametrize("size", [5_000, 200_000])
def test_order_looks_random_and_follows_from_its_key(size):
    slots = np.arange(size)
    items, others = Permutation(size, "a", 1)(slots), Permutation(size, "a", 2)(slots)
    assert np.array_equal(items, Permutation(size, "a", 1)(slots))
    assert (items == others).mean() < 0.01
    assert abs(np.corrcoef(slots, items)[0, 1]) < 0.05
    assert abs(np.corrcoef(items[1:], items[:-1])[0, 1]) < 0.05


def test_scrambled_numbers_are_spread_evenly():
    counts = np.bincount(scrambled(np.arange(10_000), "folds", 0) % 5)
    assert len(counts) == 5
    assert counts.min() > 1_800
    assert np.array_equal(scrambled([1, 2], "a"), scrambled([1, 2], "a"))
