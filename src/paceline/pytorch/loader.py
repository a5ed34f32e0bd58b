"""The loader of a trial: torch's, which the Trainer shards, shuffles and continues."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset

from paceline.data.dataset import Dataset as PacelineDataset
from paceline.data.dealing import Rest
from paceline.errors import ArgumentError, ArgumentTypeError
from paceline.prepare.loader import is_distributed
from paceline.pytorch.samplers import DistributedBatchSampler, DistributedSampler


class DataLoader(TorchDataLoader[Any]):
    """With torch's arguments and rules. `batch_size` is that of one rank: `context.get_per_slot_batch_size()`.

    For training, the Trainer gives each rank its share, goes on epoch after epoch, in an order that follows from the
    seed and the epoch, and after a restart continues at the very batch, with however many ranks. For validation, whole
    batches are dealt out, each once. Looped over by hand it is a plain loader.

    `dataset` may also be one of ours, such as `paceline.data.read_parquet(...)`: then batches are those of
    `shard.to_torch()`, whose further arguments are given by `columns={"feature_columns": [...], ...}`, and shuffling is
    the dataset's own `random_shuffle()`.
    """

    def __init__(self, dataset: Any, batch_size: int | None = 1, *args: Any, columns: Any = None, **kwargs: Any):
        self.paceline_dataset: PacelineDataset | None = None
        if isinstance(dataset, PacelineDataset):
            self._begin_with_ours(dataset, batch_size, args, columns, kwargs)
            return
        if columns is not None:
            raise ArgumentError("columns= is for datasets of paceline.data; torch's have collate_fn.")
        if batch_size is None and kwargs.get("batch_sampler") is None:
            raise ArgumentError("DataLoader(batch_size=None): expected the number of rows in a batch of one rank.")
        super().__init__(dataset, batch_size, *args, **kwargs)

    def _begin_with_ours(
        self, dataset: PacelineDataset, batch_size: int | None, args: Any, columns: Any, kwargs: dict[str, Any]
    ) -> None:
        theirs = [name for name in ("shuffle", "sampler", "batch_sampler", "drop_last") if kwargs.pop(name, None)]
        if args or theirs:
            raise ArgumentError(
                f"DataLoader({theirs[0] if theirs else 'shuffle'}=...) is not for a dataset of paceline.data: say "
                "dataset.random_shuffle() for its order."
            )
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ArgumentError(f"DataLoader(batch_size={batch_size!r}): expected a whole number, at least 1.")
        self.options: dict[str, Any] = {**(columns or {}), **kwargs}
        super().__init__(_Rows(), batch_size=None)
        self.paceline_dataset, self.rows_of_a_rank = dataset, batch_size

    def batches_of(self, rank: int, world_size: int, seed: int, rest: Rest) -> Any:
        """A shard of its own for this rank, as batches."""
        from paceline.data.shard import Shard

        assert self.paceline_dataset is not None
        shard = Shard(self.paceline_dataset.tree, rank, world_size, lambda: seed)
        return shard.to_torch(self.rows_of_a_rank, rest=rest, **self.options)

    def __iter__(self) -> Any:
        return super().__iter__() if self.paceline_dataset is None else iter(self.batches_of(0, 1, 0, "uneven"))

    def __len__(self) -> int:
        return super().__len__() if self.paceline_dataset is None else len(self.batches_of(0, 1, 0, "uneven"))


class _Rows(IterableDataset[Any]):
    """Stands for a dataset of ours where torch wants one of its own."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def check_loader(loader: Any, what: str, is_own: bool) -> None:
    """`is_own`: the user shares it out, repeats and continues it."""
    if isinstance(loader, TorchDataLoader):
        return
    if not is_own:
        raise ArgumentTypeError(
            f"{what} returned a {type(loader).__name__}; expected a pytorch.DataLoader. To share out the data, and go "
            "on in it after a restart, by yourself: context.experimental.disable_dataset_reproducibility_checks()."
        )
    if not hasattr(loader, "__iter__"):
        raise ArgumentTypeError(f"{what} returned a {type(loader).__name__}; expected something to loop over.")


def for_validation(loader: Any, rank: int, world_size: int) -> Any:
    """Every world_size-th batch: all ranks together have each once. Who has shared out the rows, with a sampler or
    in an iterable dataset, is not shared out once more: rows would be left out."""
    if isinstance(loader, DataLoader) and loader.paceline_dataset is not None:
        return loader.batches_of(rank, world_size, 0, "uneven")
    if world_size == 1 or not isinstance(loader, TorchDataLoader):
        return loader
    if isinstance(loader.dataset, IterableDataset) or is_distributed(loader):
        return loader
    made = copy.copy(loader)
    attributes = vars(made)  # DataLoader guards these names against its users once it is made
    attributes["_iterator"] = None
    if loader.batch_sampler is None:
        attributes["sampler"] = DistributedSampler(loader.sampler, world_size, rank)
    else:
        attributes["batch_sampler"] = DistributedBatchSampler(loader.batch_sampler, world_size, rank)
    return made
