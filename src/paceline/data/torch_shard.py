"""Shards for torch: features and labels, and loaders with processes of their own."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Sequence
from ctypes import c_char
from dataclasses import dataclass
from multiprocessing.queues import Queue
from multiprocessing.sharedctypes import RawArray, RawValue
from typing import TYPE_CHECKING, Any

from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from paceline.data.dealing import Mark
from paceline.data.feed import Fed, Feed
from paceline.data.plan import Knowledge
from paceline.data.rows import Columns, Rows, Samples
from paceline.data.torch_batches import FeaturesAndLabel, collated, pair
from paceline.errors import ArgumentError, ArgumentTypeError, DataError

if TYPE_CHECKING:
    from paceline.data.shard import Batches

_MOST_TROUBLE = 10_000
_OURS = ("in_order", "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "dataset")


@dataclass(frozen=True)
class TorchForm:
    shape: FeaturesAndLabel
    collate_fn: Callable[[Any], Any] | None
    columns: Sequence[str] | None

    @property
    def is_costly(self) -> bool:
        return self.collate_fn is not None

    def finish(self, rows: Rows) -> Rows:
        return self.shape(rows) if isinstance(rows, Columns) else rows

    def batch(self, rows: Rows) -> Any:
        if isinstance(rows, Samples):
            return (self.collate_fn or collated)(list(rows.samples))
        assert isinstance(rows, Columns)
        made = pair(rows)
        return made if self.collate_fn is None else self.collate_fn(made)


def torch_form(
    feature_columns: Sequence[str] | None,
    label_column: Any,
    feature_dtype: Any,
    collate_fn: Callable[[Any], Any] | None,
) -> TorchForm:
    from paceline.data.shard import LAST

    features = [feature_columns] if isinstance(feature_columns, str) else feature_columns
    label = label_column
    if label is not None and not isinstance(label, str):
        raise ArgumentTypeError(
            f"to_torch(label_column={label!r}): expected the name of one column, or None. Several labels are among the "
            "columns that iter_torch_batches() gives by name."
        )
    columns = None
    if features is not None and label is not LAST:
        columns = [*features, *([label] if label else [])]
    return TorchForm(FeaturesAndLabel(features, label, feature_dtype, is_last=label is LAST), collate_fn, columns)


class LoaderFeed(IterableDataset[Any]):
    """What the processes of a loader read: of the rank's batches, each of them takes its turn. Where to begin is in
    shared memory, since processes that persist get a dataset once only."""

    def __init__(self, feed: Feed, knowledge: Knowledge):
        self.feed, self._knowledge = feed, knowledge
        self._epoch = RawValue("q", 0)
        self._trouble = RawArray(c_char, _MOST_TROUBLE)
        self._mark: Mark = Mark()
        self._mark_epoch = 0
        self._turn = (0, 1)

    def begin(self, epoch: int, mark: Mark) -> None:
        self._epoch.value = epoch
        if mark != Mark():
            self._mark, self._mark_epoch = mark, epoch

    def __iter__(self) -> Iterator[Fed]:
        worker = get_worker_info()
        if worker is not None:
            self._turn = worker.id, worker.num_workers
            # Datasets divide themselves among a loader's processes if they find out that there are some. Here batches
            # are dealt to the processes, and each must see the whole stream.
            torch_worker._worker_info = None
            Queue._on_queue_feeder_error = staticmethod(self._end_process)  # type: ignore[attr-defined]
        part, num_parts = self._turn
        epoch = self._epoch.value
        mark = self._mark if epoch == self._mark_epoch else Mark()
        return self.feed.epoch(epoch, mark, self._knowledge, None, part, num_parts)

    def _end_process(self, error: BaseException, item: Any) -> None:
        """In a loader's process: what it has made cannot be sent. Python's queues print that and go on, and the loop
        would wait for ever for this batch, or go on without it; the end of the process is noticed."""
        made = item[1] if isinstance(item, tuple) and len(item) == 2 else item
        what = f"the exception {made.exc_type.__name__}" if isinstance(made, ExceptionWrapper) else "a batch"
        detail = f" {made.exc_msg}" if isinstance(made, ExceptionWrapper) else ""
        text = f"A process of to_torch(num_workers=...) has made {what} that cannot be pickled: {error}.{detail}"
        self._trouble.value = text.encode(errors="replace")[: _MOST_TROUBLE - 1]
        # As if all were well: for any other status, torch raises in a signal handler, wherever the program is then.
        os._exit(0)

    @property
    def trouble(self) -> str:
        """Why one of the processes has ended itself."""
        return self._trouble.value.decode(errors="replace")


class TorchLoader:
    """A torch DataLoader of batches that come from a shard, which knows what was handed out of them."""

    def __init__(self, batches: Batches, num_workers: int, options: dict[str, Any]):
        self._batches, self._options, self._num_workers = batches, options, num_workers
        self._feed: LoaderFeed | None = None
        self._loader: DataLoader[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        return self._batches.tracked(self._read)

    def __len__(self) -> int:
        return len(self._batches)

    def _read(self, epoch: int, mark: Mark) -> Generator[Fed, None, None]:
        if self._loader is None or mark != Mark():
            self._feed = LoaderFeed(self._batches.feed, self._batches.shard.knowledge)
            self._feed.begin(epoch, mark)
            self._loader = DataLoader(self._feed, batch_size=None, num_workers=self._num_workers, **self._options)
        assert self._feed is not None
        self._feed.begin(epoch, mark)
        return _received(self._loader, self._feed)


def _received(loader: DataLoader[Any], feed: LoaderFeed) -> Generator[Fed, None, None]:
    try:
        for fed in loader:
            yield Fed(*fed)
    except (RuntimeError, OSError, EOFError) as error:  # also of batches before, which went with the process
        if feed.trouble:
            raise DataError(feed.trouble) from error
        raise


def torch_loader(batches: Batches, num_workers: int, options: dict[str, Any]) -> TorchLoader:
    if isinstance(num_workers, bool) or not isinstance(num_workers, int) or num_workers < 0:
        raise ArgumentError(f"num_workers={num_workers!r}: expected a whole number, at least 0.")
    wrong = [name for name in options if name in _OURS]
    if wrong:
        raise ArgumentError(f"to_torch({wrong[0]}=...): a shard decides that itself; see its other arguments.")
    return TorchLoader(batches, num_workers, options)
