"""torch's datasets: map-style ones by index, iterable ones from their first row on."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cached_property
from hashlib import blake2b
from itertools import islice
from typing import Any

import numpy as np

from paceline.data.draws import drawing_row
from paceline.data.rows import Rows, Samples
from paceline.errors import ArgumentError


def _module() -> Any:
    return sys.modules.get("torch.utils.data")


class TorchSource:
    """A map-style dataset. Its length is asked for once."""

    def __init__(self, dataset: Any):
        self.dataset = dataset
        try:
            self._size = len(dataset)
        except TypeError as error:
            raise ArgumentError(
                f"dataset: a {type(dataset).__name__} has no length. Give it a __len__, or make it an IterableDataset."
            ) from error

    @staticmethod
    def takes(value: Any) -> bool:
        module = _module()
        return (
            module is not None and isinstance(value, module.Dataset) and not isinstance(value, module.IterableDataset)
        )

    def __len__(self) -> int:
        return self._size

    def take(self, indices: Any) -> Rows:
        numbers = indices.tolist()
        if hasattr(self.dataset, "__getitems__"):
            return Samples(list(self.dataset.__getitems__(numbers)))
        samples = []
        for number in numbers:
            with drawing_row(number):
                samples.append(self.dataset[number])
        return Samples(samples)

    def column_names(self) -> None:
        return None

    def fingerprint(self) -> str:
        """Of its type and length, since what its rows are only its own code knows; and of what a Subset has chosen, as
        `random_split` draws it anew in every program."""
        return self._mark

    @cached_property
    def _mark(self) -> str:
        marks, one = [f"{_type_of(self.dataset)} {self._size}"], self.dataset
        while isinstance(one, _module().Subset):
            chosen = np.fromiter(one.indices, np.int64, len(one.indices))
            one = one.dataset
            marks.append(f"{blake2b(chosen.tobytes(), digest_size=8).hexdigest()} of {_type_of(one)}")
        return " ".join(marks)

    def describe(self) -> dict[str, Any]:
        return {"kind": "torch", "type": _type_of(self.dataset), "num_rows": self._size}


class TorchStreamSource:
    """An iterable dataset. Every rank goes through all of it, so it must not divide itself, and must give the same rows
    each time. It is told the epoch, if it has `set_epoch`."""

    def __init__(self, dataset: Any):
        self.dataset = dataset

    @staticmethod
    def takes(value: Any) -> bool:
        module = _module()
        return module is not None and isinstance(value, module.IterableDataset)

    def open(self, skip: int, epoch: int) -> Iterator[Any]:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        return islice(iter(self.dataset), skip, None)

    def column_names(self) -> None:
        return None

    def fingerprint(self) -> str:
        return _type_of(self.dataset)

    def describe(self) -> dict[str, Any]:
        return {"kind": "torch iterable", "type": self.fingerprint()}


def _type_of(dataset: Any) -> str:
    return f"{type(dataset).__module__}.{type(dataset).__qualname__}"
