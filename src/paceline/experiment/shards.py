"""What a worker reads: each dataset of the experiment, cut for this rank, with its position in every checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

from torch.utils.data import default_collate

from paceline import session
from paceline.data.making import as_dataset
from paceline.prepare.device import get_device, move_batch


def shards_of(datasets: Any) -> SimpleNamespace:
    """An object with an attribute for each dataset: this rank's part of it; outside of a run, all of it.

    Every rank has made the datasets for itself, so nothing large travels, and a run that is resumed needs nobody to
    hand them over again. A dataset with a true attribute `shuffle` has another order in every epoch.
    """
    items: dict[str | None, Any] = {name: _described(name, one) for name, one in datasets_in(datasets).items()}
    running = session.current()
    if running is not None and items:
        running.offer(items)
        shards = {name: session.get_data_shard(name) for name in items}
    else:
        shards = {name: item.get_split() for name, item in items.items()}
    return SimpleNamespace(**{str(name): DatasetShard(shard) for name, shard in shards.items()})


def datasets_in(datasets: Any) -> dict[str, Any]:
    """Of a container, by name, in the order in which it has set them."""
    return {name: one for name, one in vars(datasets).items() if not name.startswith("_")} if datasets else {}


def _described(name: str, dataset: Any) -> Any:
    described = as_dataset(dataset, f"datasets.{name}")
    return described.random_shuffle() if getattr(dataset, "shuffle", False) is True else described


class DatasetShard:
    """This rank's part of one dataset. Beside `iter_torch_batches` it has what every shard has, `iter_batches` say."""

    def __init__(self, shard: Any):
        self._shard = shard

    def iter_torch_batches(
        self,
        batch_size: int | None = 256,
        prefetch_batches: int | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        **options: Any,
    ) -> Loader:
        """Batches on this worker's device; each loop is an epoch.

        `collate_fn` gets the rows as Ray Data would give them: `{"item": [row, row, ...]}` of a torch dataset, a dict
        of tensors of one that has columns. Without it, rows are stacked as by torch's DataLoader. `options` are those
        of `Shard.iter_torch_batches`.
        """
        collate = partial(_collated, collate_fn)
        return Loader(
            self._shard.iter_torch_batches(batch_size, collate_fn=collate, prefetch_batches=prefetch_batches, **options)
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._shard, name)


class Loader:
    """Batches to loop over, once for each epoch. It has the length of a whole epoch, if that can be known."""

    def __init__(self, batches: Any):
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        device = get_device()
        for batch in self._batches:
            yield batch if device.type == "cpu" else move_batch(batch, device, non_blocking=True)

    def __len__(self) -> int:
        return len(self._batches)


def _collated(collate_fn: Callable[[Any], Any] | None, rows: Any) -> Any:
    if isinstance(rows, list):
        return default_collate(rows) if collate_fn is None else collate_fn({"item": rows})
    return rows if collate_fn is None else collate_fn(rows)
