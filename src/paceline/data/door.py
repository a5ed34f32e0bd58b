"""What a rank reads in one attempt: its shards, and where they are. The session keeps it with every checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, count
from typing import Any

from paceline.data.dataset import Dataset
from paceline.data.folds_in_worker import FoldsInWorker
from paceline.data.given import Handout
from paceline.data.row_log import RowLog
from paceline.data.shard import Shard
from paceline.errors import ArgumentError, DataError, TrainerStateError
from paceline.workers.base import Place

logger = logging.getLogger(__name__)


class Door:
    """It is a Keeper of the session, from the first shard on."""

    name = "data"

    def __init__(
        self,
        handout: Handout,
        place: Place,
        seed: Callable[[], int],
        keep: Callable[[Any], None],
        rows: RowLog | None = None,
    ):
        self._handout, self._place, self._seed = handout, place, seed
        self._keep, self._rows = keep, rows
        self._shards: dict[str, Any] = {}
        self._restored: dict[str, list[Any]] = {}
        """Of each shard, what all ranks had saved of it."""
        self._keys: dict[str, str] = {}
        """By what a shard gives: under which name its position is kept."""
        self._is_kept = False
        self._folds: FoldsInWorker | None = None

    @property
    def wait_s(self) -> float:
        return float(sum(shard.wait_s for shard in self._shards.values()))

    @property
    def latest(self) -> Any:
        """The batch that the latest loop is at."""
        latest = [shard.latest for shard in self._shards.values() if shard.latest is not None]
        return max(latest, key=lambda one: one.number, default=None)

    def item(self, name: str | None, what: str) -> Any:
        items = self._handout.items
        if self._handout.folds:
            raise TrainerStateError(f"{what}: the run has folds; loop over get_datasets().")
        if name not in items:
            if None in items:
                raise ArgumentError(f"{what}: the run has one dataset, without a name.")
            raise ArgumentError(f"{what}: the run has several datasets; say which of {', '.join(map(repr, items))}.")
        return items[name]

    def dataset(self, name: str | None, what: str = "get_dataset()") -> Any:
        item = self.item(name, what)
        return self._bound(item, name) if isinstance(item, Dataset) else RayInWorker(self, item, name)

    def _bound(self, dataset: Dataset, name: str | None) -> Dataset:
        return dataset.bound(_Named(self, name))

    def folds(self) -> FoldsInWorker:
        if not self._handout.folds:
            raise TrainerStateError(
                "get_datasets(): this run was given no folds. Pass a list of pairs: trainer.run(train_func, "
                "dataset=paceline.data.to_cv(dataset, splits=5)). What it was given, get_dataset() has."
            )
        if self._folds is None:
            self._folds = FoldsInWorker(self._handout.folds, self.make)
            self._keep(self._folds)
        return self._folds

    @property
    def is_repeating(self) -> bool:
        """Whether the function does now what it had done before the checkpoint from which it goes on."""
        return self._folds is not None and self._folds.progress.is_repeating

    def make(self, dataset: Dataset, name: str | None, rank: int | None) -> Shard:
        """The same one each time: it knows how often it was looped over."""
        place, number = self._place, self._place.world_rank if rank is None else rank
        if not 0 <= number < place.world_size:
            raise ArgumentError(f"get_shard({rank}): the ranks are 0 to {place.world_size - 1}.")
        if number != place.world_rank:  # somebody else's: its position is not ours to keep
            return self._new(f"{name or ''}|{dataset.fingerprint()}", dataset, name, number)
        identity = f"{name or ''}|{dataset.identity()}"
        if identity not in self._keys:
            key = self._keys[identity] = self._new_key(f"{name or ''}|{dataset.fingerprint()}")
            self._add(key, self._new(key, dataset, name, number), repr(dataset))
        made: Shard = self._shards[self._keys[identity]]
        return made

    def _new_key(self, key: str) -> str:
        """Of several shards that give the same rows in other forms, each has a position of its own."""
        return next(one for one in chain([key], (f"{key} {number}" for number in count(2))) if one not in self._shards)

    def _new(self, key: str, dataset: Dataset, name: str | None, rank: int) -> Shard:
        """Its batches are noted if the run records them."""
        place = (rank, self._place.world_size, self._seed)
        return Shard(dataset.tree, *place) if self._rows is None else self._rows.shard(key, dataset, name, *place)

    def make_of_stream(self, stream: Any, name: str | None) -> Any:
        """The same of a Ray dataset, of which this rank has a stream."""
        key = f"{name or ''}|ray"
        if key not in self._shards:
            from paceline.data.ray_shard import RayShard

            place = (self._place.world_rank, self._place.world_size, self._seed)
            self._add(key, RayShard(stream, *place), "this Ray dataset")
        return self._shards[key]

    def _add(self, key: str, shard: Any, description: str) -> None:
        self._shards[key] = shard
        if not self._is_kept:
            self._is_kept = True
            self._keep(self)
        if key in self._restored:
            shard.go_on(self._restored[key])
        elif self._place.world_rank == 0 and any(_name_in(key) == _name_in(other) for other in self._restored):
            logger.warning(
                "The checkpoint has a position in other data than %s, which is read from its first row on.", description
            )

    def end_epoch(self, *, is_over: bool) -> None:
        """See `Shard.end_epoch`. Of a Ray dataset, the stream itself says it."""
        for shard in self._shards.values():
            if isinstance(shard, Shard):
                shard.end_epoch(is_over=is_over)

    def close(self) -> None:
        """The function has ended: so do the threads that read for it."""
        for shard in self._shards.values():
            shard.close()

    # --- as a Keeper --------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """By shard. What was restored and is not read (yet) stays as it was."""
        place = self._place
        unread = {key: states for key, states in self._restored.items() if key not in self._shards}
        kept = {"place": [place.world_rank, place.world_size]}
        return {**kept, "unread": unread, "read": {key: shard.state() for key, shard in self._shards.items()}}

    def restore(self, own: Any | None, everybody: Callable[[], list[Any | None]]) -> None:
        self._restored = _by_shard([state for state in everybody() if state])
        for key, shard in self._shards.items():
            if key in self._restored:
                shard.go_on(self._restored[key])


def _name_in(key: str) -> str:
    return key.rpartition("|")[0]


def _by_shard(states: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """What each rank has saved of a shard. Who has not read it says what it began with, if nobody has read it."""
    try:
        read = {
            key: [one["read"][key] for one in states if key in one["read"]] for one in states for key in one["read"]
        }
        unread = {key: list(value) for one in states for key, value in one["unread"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"A checkpoint's position in the data cannot be read: {states!r}.") from error
    return {**unread, **read}


class _Named:
    """The binding of a dataset of that name, and of whatever is made of it."""

    def __init__(self, door: Door, name: str | None):
        self._door, self._name = door, name

    def shard(self, dataset: Dataset, rank: int | None) -> Shard:
        return self._door.make(dataset, self._name, rank)


class RayInWorker:
    """A Ray dataset, of which this rank has its stream."""

    def __init__(self, door: Door, stream: Any, name: str | None):
        self._door, self._stream, self._name = door, stream, name

    def get_split(self) -> Any:
        return self._door.make_of_stream(self._stream, self._name)

    def get_shard(self, rank: int | None = None) -> Any:
        made = self.get_split()
        if rank is not None and rank != made.rank:
            raise ArgumentError(f"get_shard({rank}): of a Ray dataset, rank {made.rank} has its own part only.")
        return made

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"get_dataset().{name}: of a Ray dataset, a worker has its own part only, get_split(). Call .{name}() "
            "before it is given to run()."
        )
