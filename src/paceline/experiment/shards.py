"""What a worker reads: each dataset of the experiment, cut for this rank, with its position in every checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch.utils.data import default_collate

from paceline import session
from paceline.data.making import as_dataset
from paceline.prepare.device import get_device, move_batch

if TYPE_CHECKING:
    from paceline.data.torch_prepared import PreparedRows


def shards_of(datasets: Any, prepared: Mapping[str, str] | None = None) -> SimpleNamespace:
    """An object with an attribute for each dataset: this rank's part of it; outside of a run, all of it.

    Every rank has made the datasets for itself, so nothing large travels, and a run that is resumed needs nobody to
    hand them over again. A dataset with a true attribute `shuffle` has another order in every epoch. `prepared` has
    the folders of those that are in the cache. A Ray dataset is a stream that the driver has given to the run.
    """
    named = datasets_in(datasets)
    items: dict[str | None, Any] = {name: _described(name, one) for name, one in named.items() if not makes_ray(one)}
    running = session.current()
    if running is not None and items:
        running.offer(items)
    bound = {name: items[name] if running is None and name in items else session.get_dataset(name) for name in named}
    return SimpleNamespace(
        **{name: DatasetShard(bound[name], _ready(name, one, prepared or {})) for name, one in named.items()}
    )


def makes_ray(dataset: Any) -> bool:
    """Whether it says itself which Ray dataset it is: by a method `ray_dataset`, which the driver calls."""
    return callable(getattr(dataset, "ray_dataset", None))


def datasets_in(datasets: Any) -> dict[str, Any]:
    """Of a container, by name, in the order in which it has set them."""
    return {name: one for name, one in vars(datasets).items() if not name.startswith("_")} if datasets else {}


def _described(name: str, dataset: Any) -> Any:
    described = as_dataset(dataset, f"datasets.{name}")
    return described.random_shuffle() if getattr(dataset, "shuffle", False) is True else described


@dataclass(frozen=True)
class Ready:
    """The rows of a dataset as its `ray_map_batches` makes them."""

    numbers: Any
    """A dataset whose rows are the numbers of those rows."""
    rows: PreparedRows
    map_fn: Callable[[Any], Any]


def _ready(name: str, dataset: Any, prepared: Mapping[str, str]) -> Ready | None:
    """None if it was not prepared, or is not there (any more): the same batches are then made on the fly."""
    if name not in prepared:
        return None
    from paceline.experiment.prepared import open_prepared

    return open_prepared(f"datasets.{name}", dataset, prepared[name])


class DatasetShard:
    """This rank's part of one dataset. Beside `iter_torch_batches` it has what every shard has, `iter_batches` say."""

    def __init__(self, dataset: Any, ready: Ready | None = None):
        self._dataset, self._ready = dataset, ready
        if ready is None:
            _ = self._shard

    @cached_property
    def _shard(self) -> Any:
        return self._dataset.get_split()

    @cached_property
    def _numbers(self) -> Any:
        assert self._ready is not None
        return self._ready.numbers.in_place_of(self._dataset).get_split()

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
        shard, collate = self._shard_for(collate_fn)
        if hasattr(shard, "read"):  # a stream of Ray's, whose options are Ray's
            rest, batch_size = options.pop("rest", "uneven"), batch_size or 256
            options |= {"drop_last": True} if rest == "drop" else {}
            prefetch_batches = 1 if prefetch_batches is None else prefetch_batches
        return Loader(
            shard.iter_torch_batches(batch_size, collate_fn=collate, prefetch_batches=prefetch_batches, **options)
        )

    def _shard_for(self, collate_fn: Callable[[Any], Any] | None) -> tuple[Any, Callable[[Any], Any]]:
        """Prepared rows are for the function that they were prepared by, and for no other."""
        if self._ready is not None and collate_fn == self._ready.map_fn:
            return self._numbers, self._ready.rows.gather
        return self._shard, collating(collate_fn)

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


def collating(collate_fn: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
    """What makes a batch of the rows that a shard gives."""
    return partial(_collated, collate_fn)


def _collated(collate_fn: Callable[[Any], Any] | None, rows: Any) -> Any:
    if isinstance(rows, list):
        return default_collate(rows) if collate_fn is None else collate_fn({"item": rows})
    return rows if collate_fn is None else collate_fn(rows)
