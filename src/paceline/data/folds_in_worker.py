"""The folds of a run, as its function loops over them: each has a position, and so has the loop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, overload

from paceline.data.dataset import Dataset
from paceline.data.given import fold_name
from paceline.data.shard import Shard

logger = logging.getLogger(__name__)

Pair = tuple[Dataset, Dataset]


class Progress:
    """Which fold is under way. A loop over the folds says so; without one, the fold whose rows were read last.

    enter(i)   a loop comes to fold i
    read(i)    a loop over rows of fold i begins
    leave()    a loop over the folds has ended
    """

    def __init__(self, size: int):
        self.size = size
        self.done = 0
        """So many folds were done when the checkpoint was saved from which the run goes on."""
        self._current: int | None = None
        self._is_looping = self._is_through = self._has_read_last = False

    def enter(self, fold: int) -> None:
        self._current, self._is_looping, self._is_through = fold, True, False

    def read(self, fold: int) -> bool:
        """Gives whether there is something to read, or the fold was done before."""
        self._has_read_last |= fold == self.size - 1
        if not self._is_looping:
            self._current, self._is_through = fold, False
        return fold >= self.done

    def leave(self) -> None:
        """A loop that has read nothing, as in `list(get_datasets())`, was only looking."""
        self._is_through = self._has_read_last
        self._current, self._is_looping = None, False

    @property
    def under_way(self) -> int:
        """As many as there are, if all of them are done."""
        if self._current is not None:
            return max(self.done, self._current)
        return self.size if self._is_through else self.done

    @property
    def is_repeating(self) -> bool:
        """Whether the function passes through a fold that was done before."""
        return self._current is not None and self._current < self.done


class FoldsInWorker(Sequence[Pair]):
    """What `get_datasets()` gives: pairs (train, val) of datasets. Loop over it once.

    `items()` gives (index, (train, val)), and begins with the fold that was under way when the checkpoint was saved
    from which the run goes on. A plain loop gives all folds, so that `enumerate` counts them right: those that were
    done have no batches then, and what is reported and saved in them is dropped, since it was before.

    It is a Keeper of the session.
    """

    name = "folds"

    def __init__(self, pairs: Sequence[Pair], make: Callable[[Dataset, str, int | None], Shard]):
        self.progress = Progress(len(pairs))
        self._pairs = [
            (
                train.bound(_OfFold(make, fold_name(number, 0), partial(self.progress.read, number))),
                val.bound(_OfFold(make, fold_name(number, 1), partial(self.progress.read, number))),
            )
            for number, (train, val) in enumerate(pairs)
        ]

    def __len__(self) -> int:
        return len(self._pairs)

    @overload
    def __getitem__(self, index: int) -> Pair: ...

    @overload
    def __getitem__(self, index: slice) -> list[Pair]: ...

    def __getitem__(self, index: int | slice) -> Pair | list[Pair]:
        return self._pairs[index]

    def __iter__(self) -> Iterator[Pair]:
        return (pair for _, pair in self._looped(0))

    def items(self) -> Iterator[tuple[int, Pair]]:
        """(index, (train, val)), from the fold under way on."""
        return self._looped(self.progress.done)

    def _looped(self, first: int) -> Iterator[tuple[int, Pair]]:
        for number in range(first, len(self)):
            self.progress.enter(number)
            yield number, self._pairs[number]
        self.progress.leave()

    # --- as a Keeper --------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {"fold": self.progress.under_way, "num_folds": len(self)}

    def restore(self, own: Any | None, everybody: Callable[[], list[Any | None]]) -> None:
        states = [state for state in everybody() if state]
        sizes = {state["num_folds"] for state in states}
        if sizes <= {len(self)}:
            self.progress.done = min((int(state["fold"]) for state in states), default=0)
        else:
            logger.warning(
                "The checkpoint is of a run with %s folds, and this one has %d: it begins with the first.",
                " or ".join(map(str, sorted(sizes))),
                len(self),
            )


class _OfFold:
    """The binding of one dataset of a fold, and of whatever is made of it."""

    def __init__(self, make: Callable[[Dataset, str, int | None], Shard], name: str, enter: Callable[[], bool]):
        self._make, self._name, self._enter = make, name, enter

    def shard(self, dataset: Dataset, rank: int | None) -> Shard:
        shard = self._make(dataset, self._name, rank)
        shard.enter = self._enter
        return shard
