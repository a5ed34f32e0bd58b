"""What a rank reads in one attempt: its shards, and where they are. The session keeps it with every checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from paceline.data.dataset import Dataset
from paceline.data.dealing import Mark, Standing
from paceline.data.given import Handout
from paceline.data.row_log import RowLog
from paceline.data.shard import Shard, position_of, standing_as_state
from paceline.errors import ArgumentError, TrainerStateError
from paceline.workers.base import Place

logger = logging.getLogger(__name__)

NO_DATASET = "this run was given no dataset. Pass one: trainer.run(train_func, dataset=...)."


class Door:
    """It is a Keeper of the session, from the first shard on."""

    name = "data"

    def __init__(
        self,
        handout: Handout,
        place: Place,
        seed: Callable[[], int],
        keep: Callable[[Door], None],
        rows: RowLog | None = None,
    ):
        self._handout, self._place, self._seed = handout, place, seed
        self._keep, self._rows = keep, rows
        self._shards: dict[str, Shard] = {}
        self._restored: dict[str, dict[int, Mark]] = {}
        self._is_kept = False

    @property
    def wait_s(self) -> float:
        return sum(shard.wait_s for shard in self._shards.values())

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
        return self._bound(item, name) if isinstance(item, Dataset) else RayInWorker(item, self._place.world_rank)

    def _bound(self, dataset: Dataset, name: str | None) -> Dataset:
        return dataset.bound(_Named(self, name))

    def make(self, dataset: Dataset, name: str | None, rank: int | None) -> Shard:
        """The same one each time: it knows how often it was looped over."""
        number = self._place.world_rank if rank is None else rank
        if not 0 <= number < self._place.world_size:
            raise ArgumentError(f"get_shard({rank}): the ranks are 0 to {self._place.world_size - 1}.")
        key = f"{name or ''}|{dataset.fingerprint()}"
        if number != self._place.world_rank:  # somebody else's: its position is not ours to keep
            return self._new(dataset, name, number)
        if key not in self._shards:
            self._shards[key] = shard = self._new(dataset, name, number)
            if not self._is_kept:
                self._is_kept = True
                self._keep(self)
            if key in self._restored:
                shard.go_on(self._restored[key])
            elif self._restored and number == 0:
                logger.warning(
                    "The checkpoint has a position in other data than %r, which is read from its first row on.", dataset
                )
        return self._shards[key]

    def _new(self, dataset: Dataset, name: str | None, rank: int) -> Shard:
        """Its batches are noted if the run records them."""
        place = (rank, self._place.world_size, self._seed)
        return Shard(dataset.tree, *place) if self._rows is None else self._rows.shard(dataset, name, *place)

    # --- as a Keeper --------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        rank, size = self._place.world_rank, self._place.world_size
        unread = {
            key: Standing(min(marks, default=0), None, None, rank, size, marks)
            for key, marks in self._restored.items()
            if key not in self._shards
        }
        read = {key: shard.standing() for key, shard in self._shards.items()}
        return {key: standing_as_state(standing) for key, standing in {**unread, **read}.items()}

    def restore(self, own: Any | None, everybody: Callable[[], list[Any | None]]) -> None:
        states: list[Mapping[str, Any]] = [state for state in everybody() if state]
        keys = {key: None for state in states for key in state}
        self._restored = {key: position_of([state.get(key) for state in states]) for key in keys}
        for key, shard in self._shards.items():
            if key in self._restored:
                shard.go_on(self._restored[key])


class _Named:
    """The binding of a dataset of that name, and of whatever is made of it."""

    def __init__(self, door: Door, name: str | None):
        self._door, self._name = door, name

    def shard(self, dataset: Dataset, rank: int | None) -> Shard:
        return self._door.make(dataset, self._name, rank)


class RayInWorker:
    """A Ray dataset, of which this rank has its stream."""

    def __init__(self, stream: Any, rank: int):
        self._stream, self._rank = stream, rank

    def get_split(self) -> Any:
        return self._stream

    def get_shard(self, rank: int | None = None) -> Any:
        if rank is not None and rank != self._rank:
            raise ArgumentError(f"get_shard({rank}): of a Ray dataset, rank {self._rank} has its own part only.")
        return self._stream
