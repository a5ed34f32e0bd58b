"""Training batches, epoch after epoch, and where they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset

from paceline.errors import DataError
from paceline.prepare.loader import PreparedDataLoader, is_distributed
from paceline.prepare.reproducibility import rng_state, set_rng_state
from paceline.pytorch.loader import DataLoader
from paceline.pytorch.trial import PyTorchTrial
from paceline.workers.base import Place

Allgather = Callable[[Any], list[Any]]


class Source(Protocol):
    """The batches of one rank. Each loop is an epoch, or what is left of it."""

    @property
    def is_in_step(self) -> bool:
        """Whether all ranks surely have equally many batches. If not, their author has shared them out."""

    def open(self) -> Iterator[Any]: ...

    def num_left(self) -> int | None:
        """Batches that the next loop has; None if nobody knows."""

    def epoch_length(self) -> int | None: ...

    def num_rows(self, batch: Any) -> int:
        """Rows in the batch that was given last: of all ranks, or if they are not in step, of this one."""

    def state(self) -> Any:
        """For a checkpoint: after the batch that was given last."""

    def restore(self, states: Sequence[Any]) -> None:
        """Those of all former ranks."""

    def end_epoch(self) -> None:
        """Another rank has nothing left of it: what is left here is not wanted. Only if ranks are not in step."""


class Fetched(NamedTuple):
    data: Any
    num_rows: int
    is_first: bool
    """Of an epoch: not if it is continued in its middle."""
    is_last: bool
    num_left: int | None
    """Batches of the epoch that come after it."""


class TrainingFeed:
    """Endless: where an epoch ends, the next one begins. Where ranks may have differently many batches, an epoch ends
    for all of them with the first that has no more, which they tell each other at every batch: a rank that went on
    alone would wait for the others' gradients in vain."""

    def __init__(self, source: Source, allgather: Allgather):
        self._source, self._allgather = source, allgather
        self._batches: Iterator[Any] | None = None
        self._num_left: int | None = None
        self._peeked: list[Any] = []
        self._state: Any = None
        self._random: dict[str, Any] | None = None
        """The random generators before a batch was read ahead."""
        self._random_ahead: dict[str, Any] | None = None
        """The same of the checkpoint that is continued."""
        self._is_within = False
        self.epoch_length: int | None = source.epoch_length()
        """Batches of a whole epoch; None if nobody knows."""

    def restore(self, states: Sequence[Any], is_within_epoch: bool, random_ahead: dict[str, Any] | None) -> None:
        if states:  # an own source has none
            self._source.restore(states)
        self._is_within, self._random_ahead = is_within_epoch, random_ahead

    def state(self) -> Any:
        return self._source.state() if self._state is None else self._state

    def random_ahead(self) -> dict[str, Any] | None:
        """For a checkpoint, if a batch was read ahead: the random generators before that. It is read again with these,
        while training goes on with those of now."""
        return self._random

    def __next__(self) -> Fetched:
        is_first = self._batches is None and not self._is_within
        if self._batches is None:
            self._begin_loop()
            self._is_within = True
        assert self._batches is not None
        data = self._peeked.pop() if self._peeked else self._read()
        if data is _END:
            if self._num_left:
                raise DataError(f"The training loader has ended {self._num_left} batches before the end that it tells.")
            raise DataError(
                "The training data is empty, or has less rows than a batch of all ranks, which drop_last leaves out."
            )
        num_rows = self._source.num_rows(data)
        self._state = self._random = None
        if self._num_left is None:
            num_rows, is_last = self._agreed(num_rows, self._peek())
        else:
            self._num_left -= 1
            is_last = self._num_left <= 0
            if is_last:
                next(self._batches, None)  # its end is what moves the position to the next epoch
        num_left = self._num_left
        if is_last:
            self._batches, self._is_within, self._state, self._random = None, False, None, None
        return Fetched(data, num_rows, is_first, is_last, num_left)

    def _begin_loop(self) -> None:
        self._num_left, self._batches = self._source.num_left(), self._source.open()
        if self._num_left != 0:
            return
        following = next(self._batches, _END)
        if following is _END:  # it was continued at its very end
            self._num_left, self._batches = self._source.num_left(), self._source.open()
        else:  # there is more than its length tells
            self._peeked.append(following)

    def _read(self) -> Any:
        assert self._batches is not None
        ahead, self._random_ahead = self._random_ahead, None
        if ahead is None:
            return next(self._batches, _END)
        now = rng_state()
        set_rng_state(ahead)
        data = next(self._batches, _END)
        set_rng_state(now)
        return data

    def _agreed(self, num_rows: int, is_last: bool) -> tuple[int, bool]:
        """Over all ranks: rows of this batch, and whether it is the last of the epoch."""
        if self._source.is_in_step:
            return num_rows, is_last
        told = self._allgather((num_rows, is_last))
        ends = any(one for _, one in told)
        if ends:
            self._peeked.clear()
            self._source.end_epoch()
        return sum(rows for rows, _ in told), ends

    def _peek(self) -> bool:
        """Nobody knows how many there are: whether this was the last one shows when the next is read."""
        assert self._batches is not None
        self._state, self._random = self._source.state(), rng_state()
        following = next(self._batches, _END)
        if following is _END:
            self._random = None
            return True
        self._peeked.append(following)
        return False

    def close(self) -> None:
        """Ends the processes of loaders, which may hang at the interpreter's end otherwise."""
        self._batches = None
        self._peeked.clear()


_END: Any = object()


class TorchSource:
    """A torch DataLoader, shared out among the ranks."""

    def __init__(self, loader: TorchDataLoader[Any], trial: PyTorchTrial, place: Place, seed: int):
        self._trial, self._world_size = trial, place.world_size
        self.is_in_step = place.world_size == 1 or not isinstance(loader.dataset, IterableDataset)
        self._epoch = 0
        self._loader = PreparedDataLoader(
            loader, place=place, seed=seed, is_sharded=not is_distributed(loader), device=None
        )

    def open(self) -> Iterator[Any]:
        self._left, self._stride = self._loader.num_samples_left()
        batches = iter(self._loader)
        self._epoch = self._loader.state_dict()["epoch"]
        return batches

    def num_left(self) -> int | None:
        return self._loader.num_left() if self.is_in_step else None

    def epoch_length(self) -> int | None:
        try:
            return len(self._loader)
        except TypeError:
            return None

    def num_rows(self, batch: Any) -> int:
        if self._left is None:
            return self._trial.get_batch_length(batch) * (self._world_size if self.is_in_step else 1)
        taken = min(self._stride, self._left)
        self._left -= taken
        return taken

    def state(self) -> Any:
        return self._loader.state_dict()

    def restore(self, states: Sequence[Any]) -> None:
        self._loader.load_state_dict(states)

    def end_epoch(self) -> None:
        self._loader.set_epoch(self._epoch + 1)


class ShardSource:
    """A dataset of ours. Ranks have equally many rows: the last batch is filled up."""

    is_in_step = True

    def __init__(self, loader: DataLoader, place: Place, seed: int):
        self._batches = loader.batches_of(place.world_rank, place.world_size, seed, "pad")
        inner = self._batches if hasattr(self._batches, "shard") else self._batches._batches
        self._shard = inner.shard

    def open(self) -> Iterator[Any]:
        return iter(self._batches)

    def num_left(self) -> int | None:
        return None

    def epoch_length(self) -> int | None:
        try:
            return len(self._batches)
        except TypeError:
            return None

    def num_rows(self, batch: Any) -> int:
        return int(self._shard.latest.num_rows)

    def state(self) -> Any:
        return self._shard.state()

    def restore(self, states: Sequence[Any]) -> None:
        self._shard.go_on(states)

    def end_epoch(self) -> None:
        pass


class OwnSource:
    """Whatever the user loops over, who shares it out, and goes on in it after a restart."""

    def __init__(self, loader: Any, trial: PyTorchTrial, world_size: int):
        self._loader, self._trial = loader, trial
        self.is_in_step = world_size == 1

    def open(self) -> Iterator[Any]:
        return iter(self._loader)

    def num_left(self) -> int | None:
        return None

    def epoch_length(self) -> int | None:
        return len(self._loader) if hasattr(self._loader, "__len__") else None

    def num_rows(self, batch: Any) -> int:
        return self._trial.get_batch_length(batch)

    def state(self) -> Any:
        return None

    def restore(self, states: Sequence[Any]) -> None:
        pass

    def end_epoch(self) -> None:
        pass


def source_of(loader: Any, trial: PyTorchTrial, place: Place, seed: int, is_own: bool) -> Source:
    """`is_own`: the user shares it out."""
    if is_own:
        return OwnSource(loader, trial, place.world_size)
    if isinstance(loader, DataLoader) and loader.paceline_dataset is not None:
        return ShardSource(loader, place, seed)
    return TorchSource(loader, trial, place, seed)
