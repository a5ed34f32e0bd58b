"""A DataLoader that gives each rank its share, moves batches to the device and resumes at any batch."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from paceline.data.seeds import derived_seed
from paceline.errors import ArgumentError, ArgumentTypeError
from paceline.prepare.device import get_device, move_batch
from paceline.prepare.order import BatchOrder, Position, Progress, ShardSampler, Share
from paceline.prepare.rng import RandomStream
from paceline.prepare.scope import current_place, current_scope
from paceline.prepare.tensor_rows import as_it_is, rows_together
from paceline.workers.base import Place

logger = logging.getLogger(__name__)


def prepare_data_loader(
    loader: DataLoader[Any] | PreparedDataLoader, add_dist_sampler: bool = True, move_to_device: bool = True
) -> PreparedDataLoader:
    """Give each worker its share of every epoch, on its device; the given loader stays as it was.

    Order and shares follow from (seed, epoch): all ranks must prepare the same loader. The seed is that of
    `enable_reproducibility`, else that of the loader's `generator`, else 0. A sampler that is distributed
    already is kept; an iterable dataset has no order to share, so its author divides it. Preparing twice
    changes nothing.
    """
    if isinstance(loader, PreparedDataLoader):
        return loader
    if not isinstance(loader, DataLoader):
        raise ArgumentTypeError(
            f"prepare_data_loader was given {loader!r} of type {type(loader).__name__}; "
            "expected a torch.utils.data.DataLoader."
        )
    place = current_place()
    if add_dist_sampler and place.world_size > 1 and isinstance(loader.dataset, IterableDataset):
        _say_that_the_author_shards(loader, place)
    return PreparedDataLoader(
        loader,
        place=place,
        seed=_seed_for(loader),
        is_sharded=add_dist_sampler and not is_distributed(loader),
        device=get_device() if move_to_device else None,
    )


class PreparedDataLoader:
    """What `prepare_data_loader` returns. Everything else that a DataLoader has is found on it, too.

    Each loop over it is one epoch and the epoch counts itself. `state_dict()` is the position: how much of
    which epoch's order the loops of all ranks were given, whatever the loader's workers have loaded ahead.
    After `load_state_dict()` the next loop goes on there, also with another number of workers. A loop that was
    left early is not continued by the next one, which is a new epoch.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        place: Place,
        seed: int,
        is_sharded: bool,
        device: torch.device | None,
    ):
        self._position = Position()
        self.dataset, self.collate_fn = loader.dataset, loader.collate_fn
        self._rank, self._seed, self._device = place.world_rank, seed, device
        self._is_iterable = isinstance(loader.dataset, IterableDataset)
        world = (place.world_rank, place.world_size) if is_sharded else (0, 1)

        def shard(source: Any, drop_last: bool) -> ShardSampler:
            return ShardSampler(source, Share(*world, drop_last), seed, self._position)

        self._loader = loader if self._is_iterable else _reordered(loader, shard, place.world_rank)
        self._num_loops = 0
        self._is_dealt_out = is_sharded or place.world_size == 1
        samplers = (self._loader.batch_sampler, self._loader.sampler)
        self._order = next((one for one in samplers if isinstance(one, BatchOrder)), None)
        self._stride = 1 if self._order is None else self._order.stride

    def __iter__(self) -> Iterator[Any]:
        self._position.begin()
        self._num_loops += 1
        epoch, start = self._position.epoch, self._position.done
        if self._is_iterable and hasattr(self._loader.dataset, "set_epoch"):
            self._loader.dataset.set_epoch(epoch)
        own = [] if self._loader.generator is None else [self._loader.generator]
        # A loader draws its workers' seed when a loop begins. Drawn from the global generator, a resumed
        # epoch would draw once more than an unbroken one, and every random number of the training after it
        # would differ.
        with RandomStream(derived_seed("loader", self._seed, epoch, self._rank), own).lent():
            batches = iter(self._loader)
            if self._is_iterable:  # without indices to skip, what was seen is read again and dropped
                next(islice(batches, start, start), None)
        progress = self._order.progress(start) if self._order is not None and self._is_dealt_out else None
        return self._track(batches, epoch, start, self._num_loops, progress)

    def _track(
        self, batches: Iterator[Any], epoch: int, start: int, loop: int, progress: Progress | None
    ) -> Iterator[Any]:
        done, scope = start, current_scope()
        try:
            for batch in batches:
                scope.progress = progress
                if progress is not None:
                    progress.before = done
                done += self._stride
                if loop == self._num_loops:  # of two loops at a time, the later one holds the position
                    self._position.put(epoch, done, is_begun=True)
                yield batch if self._device is None else self._move(batch, self._device)
            if loop == self._num_loops:
                self._position.put(epoch + 1)
        finally:  # also of a loop that is left early
            if progress is not None and scope.progress is progress:
                progress.is_over = True

    def _move(self, batch: Any, device: torch.device) -> Any:
        return move_batch(batch, device, non_blocking=self._loader.pin_memory)

    def __len__(self) -> int:
        """Batches in a whole epoch of this rank, also when the next loop starts in the middle of one."""
        return len(self._loader)

    def num_left(self) -> int | None:
        """Batches that the next loop has for this rank; None if that cannot be known."""
        done = 0 if self._position.is_begun else self._position.done
        try:
            return len(self._loader) - done if self._order is None else self._order.num_left(done)
        except TypeError:  # a dataset or a sampler without a length
            return None

    def num_samples_left(self) -> tuple[int | None, int]:
        """How many samples the next loop has for all ranks together, None if that cannot be known; and how many of them
        they get at a time."""
        done = 0 if self._position.is_begun else self._position.done
        try:
            left = None if self._order is None or not self._is_dealt_out else self._order.num_items_left(done)
        except TypeError:
            left = None
        return left, self._stride

    def set_epoch(self, epoch: int) -> None:
        """Not needed, as epochs count themselves; for code that announces them, and to start anywhere."""
        self._position.set_epoch(epoch)

    def state_dict(self) -> dict[str, int]:
        """`done` counts items of the epoch's order over all ranks, which go through it in step. It counts batches of
        this rank alone where the data is an iterable dataset, or somebody else's sampler shares it out."""
        return {"epoch": self._position.epoch, "done": self._position.done}

    def load_state_dict(self, state: Mapping[str, int] | Sequence[Mapping[str, int]]) -> None:
        """Go on there. Of the states of several ranks, which may not have been in step, where the last of them was:
        nothing is left out, and what the others were ahead comes again."""
        states = [state] if isinstance(state, Mapping) else state
        try:
            epoch, done = min((int(one["epoch"]), int(one["done"])) for one in states)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ArgumentError(
                f"a loader's state is {{'epoch': int, 'done': int}}, or those of all ranks; this one is {state!r}."
            ) from error
        if not (0 <= epoch < 2**63 and 0 <= done < 2**63):
            raise ArgumentError(f"a loader's epoch and what is done of it cannot be as in {state!r}.")
        self._position.put(epoch, done)

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # not set yet: a copy is being made
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._loader!r}, {self.state_dict()})"


def _reordered(loader: DataLoader[Any], shard: Callable[[Any, bool], ShardSampler], rank: int) -> DataLoader[Any]:
    """A copy of the loader, with all that it has and of its own class, that reads its indices from us.

    Not made by its constructor: a subclass may want other arguments, and a version of torch may add some.
    """
    made: DataLoader[Any] = copy.copy(loader)
    attributes = vars(made)  # DataLoader guards these names against its users once it is made
    attributes["_iterator"] = None
    batches = loader.batch_sampler
    if batches is None:
        attributes["sampler"] = BatchOrder(shard(loader.sampler, False), loader.sampler, rank)
    elif type(batches) is BatchSampler:
        attributes["sampler"] = samples = shard(batches.sampler, batches.drop_last)
        attributes["batch_sampler"] = BatchOrder(samples, batches, rank, batches.batch_size)
    else:  # only its author knows how it makes batches: whole ones are dealt out
        drop_last = bool(getattr(batches, "drop_last", False))
        attributes["batch_sampler"] = BatchOrder(shard(batches, drop_last), batches, rank)
    rows = rows_together(loader)
    if rows is not None:
        attributes["dataset"], attributes["collate_fn"] = rows, as_it_is
    return made


def _seed_for(loader: DataLoader[Any]) -> int:
    seed = current_scope().seed
    if seed is not None:
        return seed
    return 0 if loader.generator is None else loader.generator.initial_seed()


def is_distributed(loader: DataLoader[Any]) -> bool:
    """By type or by the two attributes that such samplers take over from torch's."""
    samplers = [loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
    return any(
        isinstance(sampler, DistributedSampler) or (hasattr(sampler, "num_replicas") and hasattr(sampler, "rank"))
        for sampler in samplers
    )


def _say_that_the_author_shards(loader: DataLoader[Any], place: Place) -> None:
    notices = current_scope().notices
    if place.world_rank == 0 and "iterable" not in notices:
        notices.add("iterable")
        logger.warning(
            "%s is an IterableDataset: Paceline cannot divide it, so every worker reads what its __iter__ "
            "yields. Divide it there by paceline.world_rank() and paceline.world_size().",
            type(loader.dataset).__name__,
        )
