"""In which order a rank sees its data: a pure function of (sampler, seed, epoch, rank, number of ranks).

Nothing here remembers what was drawn before, so a resumed run finds the order of any epoch again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, cycle, islice
from typing import Any

import torch
from torch.utils.data import Sampler, get_worker_info

from paceline.data.seeds import derived_seed
from paceline.prepare.rng import RandomStream, seed_generators

_CHUNK = 4096  # indices drawn at a time: swapping generators costs little then, and a sampler may be endless


@dataclass
class Position:
    """Where a loader stands: the first `done` items of the epoch's order have been given out, to all ranks together. So
    it means the same for any number of ranks and any size of batches. `is_begun`: batches were taken since it was set;
    a new loop is a new epoch."""

    epoch: int = 0
    done: int = 0
    is_begun: bool = False

    def put(self, epoch: int, done: int = 0, *, is_begun: bool = False) -> None:
        self.epoch, self.done, self.is_begun = epoch, done, is_begun

    def set_epoch(self, epoch: int) -> None:
        """Keeps what is done of a loaded position's epoch: a resumed loop may announce it as always."""
        if epoch != self.epoch or self.is_begun:
            self.put(epoch)

    def begin(self) -> None:
        if self.is_begun:
            self.put(self.epoch + 1)


@dataclass
class Extent:
    """How many items the order of an epoch has: None as long as its end was not drawn."""

    total: int | None = None


@dataclass
class Progress:
    """How far a loop is that deals out an order to `world_size` ranks. It began at item `start`, its latest batches at
    item `before`, which the loop moves, of `size` items for each rank at most."""

    extent: Extent
    world_size: int
    size: int
    start: int
    before: int
    is_of_samples: bool = True
    """Or of whole batches, as somebody else's batch sampler makes them."""
    is_over: bool = False
    """Whether the loop has ended, so that nobody is at work on its latest batch."""

    def num_given(self, since: int) -> int:
        """Items that each rank was given from there on, those included by which the order was filled up."""
        return (self._end() - since) // self.world_size

    def num_items(self, since: int) -> int:
        """Items of the order that all ranks together were given from there on, each counted once."""
        total = self.extent.total
        return (self._end() if total is None else min(self._end(), total)) - since

    def _end(self) -> int:
        end = self.before + self.size * self.world_size
        if self.extent.total is None:
            return end
        return min(end, self.start + -(-(self.extent.total - self.start) // self.world_size) * self.world_size)


@dataclass(frozen=True)
class Share:
    """What one of several ranks gets: every world_size-th item, equally many on each rank.

    An order that does not divide evenly is filled up from its start, or cut with `drop_last`. What was done of it, by
    however many ranks, is left out.
    """

    rank: int = 0
    world_size: int = 1
    drop_last: bool = False

    def of(self, order: Iterator[Any], done: int = 0) -> Iterator[Any]:
        head = list(islice(order, self.world_size))
        rest = islice(chain(head, order), done, None)
        while group := list(islice(rest, self.world_size)):
            missing = self.world_size - len(group)
            if missing and self.drop_last:
                return
            yield [*group, *islice(cycle(head), missing)][self.rank]

    def count(self, total: int) -> int:
        return total // self.world_size if self.drop_last else -(-total // self.world_size)


class ShardSampler(Sampler[Any]):
    """One rank's share of what another sampler, of samples or of batches, yields in an epoch.

    The other sampler draws from generators seeded by (seed, epoch), equal on all ranks: it keeps its kind of
    order and the ranks' shares do not overlap. A sampler with a random generator that is neither global nor
    called `generator` has to be seeded alike on all ranks by its owner.
    """

    def __init__(self, source: Any, share: Share, seed: int, position: Position):
        self.source, self.share, self.seed = source, share, seed
        self.position = position

    def set_epoch(self, epoch: int) -> None:
        self.position.set_epoch(epoch)

    def order(self, epoch: int, done: int = 0, extent: Extent | None = None) -> Iterator[Any]:
        for sampler in _with_inner(self.source):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
        drawn = seeded_order(self.source, derived_seed("order", self.seed, epoch), extent)
        return islice(drawn, done, None) if self.share.world_size == 1 else self.share.of(drawn, done)

    def __iter__(self) -> Iterator[Any]:
        return self.order(self.position.epoch)

    def __len__(self) -> int:
        return self.share.count(len(self.source))

    def __getattr__(self, name: str) -> Any:
        return _attribute_of("source", self, name)


class BatchOrder(Sampler[Any]):
    """What the loader reads: a shard from the position on. What comes before it is drawn, but not loaded.

    A shard of samples is cut into batches of `size`; one of batches (or of samples that a loader takes one by
    one) is passed on. Other attributes are those of the sampler in whose place this one stands.
    """

    def __init__(self, shard: ShardSampler, replaced: Any, rank: int, size: int | None = None):
        self.sampler, self.replaced, self.rank, self._size = shard, replaced, rank, size
        self.extent = Extent()
        """Of the latest loop."""

    def set_epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)

    @property
    def stride(self) -> int:
        """How many items of the order are done when every rank has been given one more batch."""
        return (self._size or 1) * self.sampler.share.world_size

    def __iter__(self) -> Iterator[Any]:
        # Read now, not at the first batch: the position may have moved by then.
        position, self.extent = self.sampler.position, Extent()
        return self._from(position.epoch, position.done, self.extent)

    def progress(self, start: int) -> Progress:
        """Of the latest loop, which begins there."""
        return Progress(
            self.extent, self.sampler.share.world_size, self._size or 1, start, start, is_of_samples=bool(self._size)
        )

    def _from(self, epoch: int, done: int, extent: Extent) -> Iterator[Any]:
        items = self.sampler.order(epoch, done, extent)
        if self._size is not None:
            items = _batched(items, self._size, self.sampler.share.drop_last)
        seed, stride = self.sampler.seed, self.stride
        for item in items:
            yield SeededBatch(item, (seed, epoch, self.rank, done)) if type(item) is list else item
            done += stride

    def __len__(self) -> int:
        return self.num_left(0)

    def num_left(self, done: int) -> int:
        """Batches of this rank, when so many items of the order are done. TypeError if its length is not known."""
        count = self.sampler.share.count(max(0, len(self.sampler.source) - done))
        return count if self._size is None else Share(0, self._size, self.sampler.share.drop_last).count(count)

    def num_items_left(self, done: int) -> int | None:
        """Samples that all ranks together still get; None if items are no samples."""
        return None if self._size is None else max(0, len(self.sampler.source) - done)

    def __getattr__(self, name: str) -> Any:
        return _attribute_of("replaced", self, name)


class SeededBatch(list[Any]):
    """The indices of a batch. Reading them in a loader's worker process seeds that process for this batch.

    Random transforms then depend on the batch, and not on which worker loads it after how many others: the
    only way for a resumed epoch to repeat them without loading what it skips. The indices are the one thing
    of ours that reaches a worker unchanged whatever the dataset, `collate_fn` and `worker_init_fn` are.
    """

    __slots__ = ("_made_of",)

    def __init__(self, indices: Iterable[Any] = (), made_of: tuple[int, ...] = ()):
        """`made_of`: of which numbers its seed is made. Only a process that reads it needs that."""
        super().__init__(indices)
        self._made_of = made_of

    @property
    def seed(self) -> int:
        return derived_seed("batch", *self._made_of)

    def __iter__(self) -> Iterator[Any]:
        if get_worker_info() is not None:
            seed_generators(self.seed)
        return super().__iter__()

    def __reduce__(self) -> tuple[type, tuple[list[Any], tuple[int, ...]]]:
        return SeededBatch, (self[:], self._made_of)


def seeded_order(source: Iterable[Any], seed: int, extent: Extent | None = None) -> Iterator[Any]:
    """Iterate over `source` with random numbers of its own, leaving everyone else's untouched. Its `extent` is known
    when its end is drawn, which is before its last item is given."""
    extent, num_drawn = extent or Extent(), 0
    stream = RandomStream(seed, _generators_of(source))
    items: Iterator[Any] | None = None
    while True:
        with stream.lent():
            items = iter(source) if items is None else items
            chunk = list(islice(items, _CHUNK))
        num_drawn += len(chunk)
        if len(chunk) < _CHUNK:
            extent.total = num_drawn
        yield from chunk
        if len(chunk) < _CHUNK:
            return


def _generators_of(source: Any) -> list[torch.Generator]:
    found = {id(g): g for g in (getattr(sampler, "generator", None) for sampler in _with_inner(source))}
    return [generator for generator in found.values() if isinstance(generator, torch.Generator)]


def _with_inner(source: Any) -> list[Any]:
    """A sampler and the one it draws from, as a batch sampler does."""
    inner = getattr(source, "sampler", None)
    return [source] if inner is None else [source, *_with_inner(inner)]


def _attribute_of(holder: str, sampler: Any, name: str) -> Any:
    if name == holder:  # not set yet: a copy is being made
        raise AttributeError(name)
    return getattr(getattr(sampler, holder), name)


def _batched(order: Iterator[Any], batch_size: int, drop_last: bool) -> Iterator[list[Any]]:
    while batch := list(islice(order, batch_size)):
        if drop_last and len(batch) < batch_size:
            return
        yield batch
