"""One rank's part of a dataset, as batches; and where it is."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.data.dealing import Mark, Rest, Standing, merge
from paceline.data.feed import Fed, Feed, ahead
from paceline.data.formats import check_format
from paceline.data.forms import CollatedRows, Form, Formatted, Raw, RowByRow
from paceline.data.plan import Knowledge, known_size
from paceline.data.position import MOST_APART, standing_as_state, standing_of
from paceline.data.rows import Columns
from paceline.data.tree import Tree, leaves
from paceline.errors import ArgumentError, ArgumentTypeError, DataError

_RESTS = ("uneven", "pad", "drop")
_NUM_AHEAD = 2
LAST: Any = "the last column"


@dataclass(frozen=True)
class Latest:
    """The batch that a loop is at: how many rows this rank has of it, and all ranks together."""

    number: int
    num_own: int
    num_rows: int
    world_size: int


_num_batches = itertools.count()


class Shard:
    """What `get_data_shard()` gives: this rank's part of every epoch.

    Each loop over its batches is one epoch, and epochs count themselves. A run that is resumed goes on where it was,
    with however many ranks; a loop that was left early is not continued by the next one, which is a new epoch.
    """

    def __init__(
        self,
        tree: Tree,
        rank: int = 0,
        world_size: int = 1,
        seed: Callable[[], int] = lambda: 0,
        on_rows: Callable[[int, Any], None] | None = None,
        on_end: Callable[[int, int], None] | None = None,
    ):
        """`on_rows` hears of each batch: its epoch, and the ids of its rows. `on_end` hears that an epoch was read to
        its end, and how many rows at the most were left out of it."""
        _introduce()
        self.tree, self.rank, self.world_size = tree, rank, world_size
        self._seed, self._on_rows, self._on_end = seed, on_rows, on_end
        self._knowledge = Knowledge()
        self._drops_rows = any(op.drops_rows for leaf in leaves(tree) for op in leaf.ops)
        self._begun: dict[int, Mark] = {}
        """Where this process began, by epoch."""
        self._epoch, self._stop, self._size = 0, None, None  # type: tuple[int, int | None, int | None]
        self._sizes: list[tuple[int, int]] = []
        """From which epoch on batches had which size."""
        self._num_loops, self._is_reading = 0, False
        self._beginning = threading.Lock()
        self.reading: list[Generator[Fed, None, None]] = []
        """What loops that are not over read from."""
        # A loop may be alive when the interpreter ends. It ends with the exit handlers then: later, its threads are
        # gone and it could not even be closed.
        weakref.finalize(self, _close, self.reading)
        self.latest: Latest | None = None
        self.enter: Callable[[], bool] = lambda: True
        """Called when a loop begins; gives whether there is one: a fold that was done before has no more batches."""
        self.wait_s = 0.0
        """How long loops have waited for data so far."""

    # --- batches ------------------------------------------------------------------------------------------------------

    def iter_batches(
        self,
        batch_size: int | None = None,
        batch_format: str = "numpy",
        *,
        global_batch_size: int | None = None,
        rest: Rest = "uneven",
        epochs: int | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        prefetch_batches: int | None = None,
    ) -> Batches:
        """Batches of rows: dicts of arrays, data frames, Arrow tables, or dicts of tensors.

        Args:
            batch_size: rows of each rank in a batch. Default: 256, if `global_batch_size` is not given.
            batch_format: "numpy", "pandas", "pyarrow" or "torch".
            global_batch_size: rows of all ranks together: then batch k has the same rows for any number of ranks.
            rest: what becomes of the last rows, if they are less than a batch. "uneven" deals them out as they are, so
                that ranks may differ by a row and have none; "pad" repeats rows, "drop" leaves them out.
            epochs: go through so many epochs in one loop, counted from the run's beginning. Default: a loop is one.
            collate_fn: called with each batch.
            prefetch_batches: how many to have ready in advance. Blocks of data are always read ahead.
        """
        form = Formatted(check_format(batch_format), collate_fn)
        return self._batches(form, batch_size, global_batch_size, rest, epochs, prefetch_batches)

    def iter_torch_batches(
        self,
        batch_size: int | None = None,
        *,
        global_batch_size: int | None = None,
        rest: Rest = "uneven",
        epochs: int | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        prefetch_batches: int | None = None,
    ) -> Batches:
        """The same as `iter_batches` with tensors. `collate_fn` gets a dict of tensors, or of a dataset whose rows are
        no columns a list of rows."""
        form: Form = Formatted("torch", collate_fn)
        if collate_fn is not None:
            form = CollatedRows(collate_fn)
        return self._batches(form, batch_size, global_batch_size, rest, epochs, prefetch_batches)

    def to_torch(
        self,
        batch_size: int | None = None,
        *,
        feature_columns: Sequence[str] | None = None,
        label_column: str | None = LAST,
        feature_dtype: Any = None,
        global_batch_size: int | None = None,
        rest: Rest = "uneven",
        epochs: int | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        prefetch_batches: int | None = None,
        num_workers: int = 0,
        **loader_options: Any,
    ) -> Any:
        """For `for x, y in shard.to_torch(batch_size=64)`: x is a matrix of the feature columns, y the label column.

        Rows that are no columns are collated as torch's DataLoader does.

        Args:
            feature_columns: default: all but the label.
            label_column: default: the last column; None: there is none, and a batch is x.
            feature_dtype: numpy's type of the matrix. Default: that of the columns; float32 if they differ, or are
                float64.
            num_workers: processes that read and collate; 0 does it in threads of this one.
            loader_options: of torch's DataLoader: pin_memory, persistent_workers, prefetch_factor …
        """
        from paceline.data.torch_shard import torch_form, torch_loader

        form = torch_form(feature_columns, label_column, feature_dtype, collate_fn)
        made = self._batches(form, batch_size, global_batch_size, rest, epochs, prefetch_batches)
        return torch_loader(made, num_workers, loader_options) if num_workers or loader_options else made

    def to_tf(
        self,
        feature_columns: str | Sequence[str],
        label_columns: str | Sequence[str],
        *,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        rest: Rest = "uneven",
    ) -> Any:
        """A `tf.data.Dataset` of (features, labels), one epoch for each loop over it. One column is a tensor, several
        are a dict of tensors. TensorFlow's own sharding is turned off: the rows are this rank's."""
        from paceline.data.tensorflow_batches import tf_dataset

        made = self._batches(Formatted("numpy"), batch_size, global_batch_size, rest, None, None)
        return tf_dataset(lambda: iter(made), self._one_row("to_tf()"), feature_columns, label_columns)

    def __iter__(self) -> Iterator[Any]:
        """Row by row. So it can be the dataset of a torch DataLoader without processes of its own; with such, it is
        `to_torch(num_workers=...)` that knows what was handed out."""
        _refuse_loader_process()
        for batch in self._batches(RowByRow(), 1, None, "uneven", None, 0):
            yield from batch

    def _batches(
        self,
        form: Form,
        batch_size: int | None,
        global_batch_size: int | None,
        rest: Rest,
        epochs: int | None,
        prefetch: int | None,
    ) -> Batches:
        size = _global_size(batch_size, global_batch_size, self.world_size)
        if rest not in _RESTS:
            raise ArgumentError(f"rest={rest!r}: expected one of {', '.join(map(repr, _RESTS))}.")
        for name, value in (("epochs", epochs), ("prefetch_batches", prefetch)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                raise ArgumentError(f"{name}={value!r}: expected a whole number, at least 0.")
        feed = Feed(self.tree, self._seed(), self.rank, self.world_size, size, rest, form)
        is_costly = form.is_costly or any(leaf.stages()[1] for leaf in leaves(self.tree))
        return Batches(self, feed, epochs, prefetch if prefetch is not None else (_NUM_AHEAD if is_costly else 0))

    def _one_row(self, what: str) -> Columns:
        """The first row of an epoch, for those who have to know what columns there are."""
        feed = Feed(self.tree, self._seed(), 0, 1, 1, "uneven", Raw())
        for fed in feed.epoch(0, Mark(), Knowledge()):
            if not isinstance(fed.data, Columns):
                raise DataError(
                    f"{what} needs columns, and a row of this dataset has none: let .map() make a dict of it."
                )
            return fed.data
        raise _nothing(feed)

    def close(self) -> None:
        """End the threads of loops that were left and that somebody still holds on to, a traceback for example."""
        _close(self.reading)

    # --- position -----------------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch that is under way, or comes next."""
        return self._epoch + (self._stop is not None and not self._is_reading)

    def standing(self) -> Standing:
        sizes = tuple(self._sizes) if len(self._sizes) > 1 else ()
        return Standing(self._epoch, self._stop, self._size, self.rank, self.world_size, self._begun, sizes)

    def state(self) -> dict[str, Any]:
        """For a checkpoint. Rank 0 adds what all ranks have learned of the data, so that nobody reads it for that."""
        learned = {"counts": self._knowledge.as_state()} if self.rank == 0 and self._drops_rows else {}
        return standing_as_state(self.standing()) | learned

    def go_on(self, states: Sequence[Mapping[str, Any]]) -> None:
        """From what all ranks have saved. The next loop begins there."""
        standings = [standing_of(state) for state in states]
        for state in states:
            self._knowledge.learn(state.get("counts", {}))
        epochs = [one.epoch for one in standings]
        if epochs and max(epochs) - min(epochs) > MOST_APART:
            raise DataError(f"A checkpoint's positions are {max(epochs) - min(epochs)} epochs apart: it is damaged.")
        self.go_on_from(merge(standings))

    def go_on_from(self, marks: Mapping[int, Mark]) -> None:
        self._begun, self._epoch, self._stop, self._size = dict(marks), min(marks, default=0), None, None
        self._sizes.clear()

    def begin_loop(self, size: int) -> tuple[int, int, Mark]:
        """The number of the loop, its epoch, and what was had of that. Several threads may loop at a time: each has an
        epoch of its own."""
        with self._beginning:
            # The loop before was left early, and what is left of its epoch is not wanted; or it is still under way.
            if self._stop is not None or self._is_reading:
                self._epoch, self._stop = self._epoch + 1, None
            self._num_loops += 1
            if not self._sizes or self._sizes[-1][1] != size:
                self._sizes.append((self._epoch, size))
            self._size, self._is_reading = size, True
            return self._num_loops, self._epoch, self._begun.get(self._epoch, Mark())

    def took(self, loop: int, epoch: int, fed: Fed) -> None:
        if loop == self._num_loops:  # of two loops at a time, the later one holds the position
            self._epoch, self._stop = epoch, fed.stop
        self.latest = Latest(next(_num_batches), len(fed.ids), fed.num_rows, self.world_size)
        if self._on_rows is not None:
            self._on_rows(epoch, fed.ids)

    def left(self, loop: int) -> None:
        """The loop is over, at its end or before."""
        if loop == self._num_loops:
            self._is_reading = False

    def ended(self, loop: int, epoch: int, num_left_out: int) -> None:
        if loop == self._num_loops:
            self._epoch, self._stop = epoch + 1, None
        if self._on_end is not None:
            self._on_end(epoch, num_left_out)

    def end_epoch(self, *, is_over: bool = True) -> None:
        """Whoever loops will ask for no more, though it has had the last batch only and not seen the end: the next
        loop, also that of a run that goes on, is the next epoch. Without `is_over`, only if all rows were had: it
        may be a loop that goes on."""
        with self._beginning:
            if self._stop is None:
                return
            epoch, has_all = self._epoch, self._stop == known_size(self.tree)
            if not (is_over or has_all):
                return
            self._epoch, self._stop, self._is_reading = epoch + 1, None, False
            self._num_loops += 1  # what the present one still does counts no more
        if has_all and self._on_end is not None:  # else it was left early, or nobody knows
            self._on_end(epoch, 0)

    @property
    def knowledge(self) -> Knowledge:
        return self._knowledge

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank {self.rank} of {self.world_size}, epoch {self._epoch})"


class Batches:
    """Loop over it: each loop is an epoch, or as many as were asked for."""

    def __init__(self, shard: Shard, feed: Feed, epochs: int | None, num_ahead: int):
        self.shard, self.feed, self.epochs, self._num_ahead = shard, feed, epochs, num_ahead

    def __iter__(self) -> Iterator[Any]:
        return self.tracked(self._read)

    def __len__(self) -> int:
        """Batches in a whole epoch, if it can be known without reading."""
        total, size = known_size(self.feed.tree), self.feed.size
        if total is None:
            raise TypeError("how many rows there are is not known before they are read")
        return total // size if self.feed.rest == "drop" else -(-total // size)

    def tracked(self, read: Callable[[int, Mark], Generator[Fed, None, None]]) -> Iterator[Any]:
        """The batches that `read` gives of an epoch, noted as they are handed out."""
        shard = self.shard
        if not shard.enter() or (self.epochs is not None and shard.epoch >= self.epochs):
            return
        owner = os.getpid()
        while True:
            loop, epoch, mark = shard.begin_loop(self.feed.size)
            items = read(epoch, mark)
            shard.reading.append(items)
            is_empty = True
            try:
                while (fed := self._next(items)) is not None:
                    is_empty = False
                    shard.took(loop, epoch, fed)
                    yield fed.data
                    if os.getpid() != owner:
                        raise DataError(
                            "This loop over data was begun in another process, of which this one is a fork, and what "
                            "reads for it is there. Begin a loop of its own here, or fork before the loop."
                        )
            finally:
                if os.getpid() == owner:
                    shard.left(loop)
                    shard.reading.remove(items)
                    items.close()
            if is_empty and mark == Mark():
                raise _nothing(self.feed)
            shard.ended(loop, epoch, self.feed.size - 1 if self.feed.rest == "drop" else 0)
            if self.epochs is None or epoch + 1 >= self.epochs:
                return

    def _next(self, items: Iterator[Fed]) -> Fed | None:
        begin = time.perf_counter()
        try:
            return next(items, None)
        finally:
            self.shard.wait_s += time.perf_counter() - begin

    def _read(self, epoch: int, mark: Mark) -> Generator[Fed, None, None]:
        feed, knowledge = self.feed, self.shard.knowledge
        return ahead(lambda executor: feed.epoch(epoch, mark, knowledge, executor), self._num_ahead)


def _close(reading: Sequence[Generator[Fed, None, None]]) -> None:
    for items in [*reading]:
        with contextlib.suppress(ValueError):  # another thread is in the middle of it
            items.close()


def _introduce() -> None:
    """To torch, if it is there: a DataLoader asks what kind of dataset it has got."""
    module = sys.modules.get("torch.utils.data")
    if module is not None:
        module.IterableDataset.register(Shard)


def _refuse_loader_process() -> None:
    module = sys.modules.get("torch.utils.data")
    if module is not None and module.get_worker_info() is not None:
        raise DataError(
            "A shard was given to a torch DataLoader with num_workers > 0, whose processes cannot know how many rows "
            "the loader takes for a batch, nor which batches were handed out. Use shard.to_torch(batch_size=..., "
            "num_workers=..., pin_memory=..., persistent_workers=...), which is such a loader."
        )


def _global_size(batch_size: int | None, global_batch_size: int | None, world_size: int) -> int:
    for name, value in (("batch_size", batch_size), ("global_batch_size", global_batch_size)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise ArgumentTypeError(f"{name}={value!r} is a {type(value).__name__}; expected a whole number.")
        if value is not None and value < 1:
            raise ArgumentError(f"{name}={value!r}: expected at least 1.")
    if batch_size is not None and global_batch_size is not None:
        raise ArgumentError(
            f"batch_size={batch_size} is for each rank, global_batch_size={global_batch_size} for all ranks together: "
            "give one of them."
        )
    if global_batch_size is not None and global_batch_size < world_size:
        raise ArgumentError(f"global_batch_size={global_batch_size} is less than a row for each of {world_size} ranks.")
    return global_batch_size or (batch_size or 256) * world_size


def _nothing(feed: Feed) -> DataError:
    named = ", ".join(leaf.name for leaf in leaves(feed.tree))
    if feed.rest == "drop":
        return DataError(
            f"{named}: an epoch has less rows than one batch of {feed.size} (all ranks together), and "
            'rest="drop" leaves them out.'
        )
    return DataError(f"{named}: there are no rows. Is the data empty, or does a filter drop all of it?")
