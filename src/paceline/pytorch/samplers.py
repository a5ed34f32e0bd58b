"""Samplers for those who put their loaders together by themselves: shuffle, then repeat, shard, batch, skip.

`pytorch.DataLoader` needs none of them: the Trainer shards, shuffles and continues it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from itertools import islice
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from paceline.errors import ArgumentError


def _checked_share(num_replicas: int, rank: int) -> None:
    if num_replicas < 1 or not 0 <= rank < num_replicas:
        raise ArgumentError(f"rank {rank} of {num_replicas}: expected a rank from 0 to num_replicas - 1.")


class _Around(Sampler[Any]):
    """What all have in common: a sampler, of samples or of batches, inside."""

    def __init__(self, inner: Any):
        self._inner = inner

    def __len__(self) -> int:
        return len(self._inner)


class RepeatSampler(_Around):
    """Endlessly, one pass after the other. Its length is that of one pass."""

    def __iter__(self) -> Iterator[Any]:
        while True:
            is_empty = True
            for item in self._inner:
                is_empty = False
                yield item
            if is_empty:
                raise ArgumentError("There is nothing to repeat: the sampler is empty.")


class DistributedSampler(_Around):
    """Item i belongs to rank i % num_replicas: none is filled in, none comes twice."""

    def __init__(self, sampler: Any, num_workers: int, rank: int):
        super().__init__(sampler)
        _checked_share(num_workers, rank)
        self._num_workers, self._rank = num_workers, rank

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self._inner), self._rank, None, self._num_workers)

    def __len__(self) -> int:
        whole, rest = divmod(len(self._inner), self._num_workers)
        return whole + (self._rank < rest)


class DistributedBatchSampler(DistributedSampler):
    """The same of whole batches."""

    def __init__(self, batch_sampler: Any, num_replicas: int, rank: int):
        super().__init__(batch_sampler, num_replicas, rank)


class SkipSampler(_Around):
    """Without the first `skip`, the first time. Its length is that of the whole."""

    def __init__(self, sampler: Any, skip: int):
        super().__init__(sampler)
        if skip < 0:
            raise ArgumentError(f"skip is {skip}: expected a number from 0 on.")
        self._skip = skip

    def __iter__(self) -> Iterator[Any]:
        skip, self._skip = self._skip, 0
        return islice(iter(self._inner), skip, None)


class ReproducibleShuffleSampler(_Around):
    """Shuffled by a generator of its own, which goes on from one pass to the next."""

    def __init__(self, sampler: Sized, seed: int):
        super().__init__(sampler)
        self._random = np.random.RandomState(seed)

    def __iter__(self) -> Iterator[Any]:
        items = list(self._inner)
        self._random.shuffle(items)
        return iter(items)


RepeatBatchSampler = RepeatSampler
SkipBatchSampler = SkipSampler
ReproducibleShuffleBatchSampler = ReproducibleShuffleSampler
