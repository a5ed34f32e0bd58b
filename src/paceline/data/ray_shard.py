"""A rank's stream of a Ray dataset, with the methods of a shard. Ray says in which order rows come."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from paceline.data.formats import check_format, from_batch
from paceline.data.forms import CollatedRows, Form, Formatted
from paceline.data.position import position_in_batches
from paceline.data.rows import Rows, Samples
from paceline.data.seeds import derived_seed
from paceline.data.shard import LAST

logger = logging.getLogger(__name__)


class RayShard:
    """What `get_data_shard()` gives of a Ray dataset. What it has not got itself is the `ray.data.DataIterator`'s.

    The stream is in Ray's order, kept by `preserve_order`. After a failure each rank skips the rows that it had in the
    epoch that was interrupted, if there are as many ranks as before; with another number the epoch begins anew.
    """

    def __init__(self, stream: Any, rank: int, world_size: int, seed: Callable[[], int] = lambda: 0):
        self._stream, self.rank, self.world_size, self._seed = stream, rank, world_size, seed
        self._epoch = self._num_had = self._num_loops = 0
        self._is_begun = self._is_reading = False
        self.wait_s = 0.0
        self.latest = None

    def iter_batches(
        self,
        batch_size: int | None = 256,
        batch_format: str = "numpy",
        *,
        collate_fn: Callable[[Any], Any] | None = None,
        epochs: int | None = None,
        **ray_options: Any,
    ) -> RayBatches:
        """See `Shard.iter_batches`; other options are those of Ray's own `iter_batches`. A local shuffle without a seed
        of yours has that of the run, and another order in every epoch: one that nobody could repeat would let a resumed
        rank skip other rows than it had."""
        return RayBatches(
            self, Formatted(check_format(batch_format or "numpy"), collate_fn), batch_size, epochs, ray_options
        )

    def iter_torch_batches(
        self,
        batch_size: int | None = 256,
        *,
        collate_fn: Callable[[Any], Any] | None = None,
        epochs: int | None = None,
        **ray_options: Any,
    ) -> RayBatches:
        form: Form = Formatted("torch") if collate_fn is None else CollatedRows(collate_fn)
        return RayBatches(self, form, batch_size, epochs, ray_options)

    def to_torch(
        self,
        batch_size: int | None = 256,
        *,
        feature_columns: Sequence[str] | None = None,
        label_column: str | None = LAST,
        feature_dtype: Any = None,
        collate_fn: Callable[[Any], Any] | None = None,
        epochs: int | None = None,
        **ray_options: Any,
    ) -> RayBatches:
        """See `Shard.to_torch`."""
        from paceline.data.torch_shard import torch_form

        form = torch_form(feature_columns, label_column, feature_dtype, collate_fn)
        return RayBatches(self, form, batch_size, epochs, ray_options)

    def to_tf(
        self,
        feature_columns: str | Sequence[str],
        label_columns: str | Sequence[str],
        *,
        batch_size: int | None = 256,
        **ray_options: Any,
    ) -> Any:
        """See `Shard.to_tf`. Ray knows the types, and refuses columns that are not there."""
        from paceline.data.tensorflow_batches import tf_dataset_of

        known = self._stream.to_tf(feature_columns, label_columns, batch_size=1).element_spec
        made = self.iter_batches(batch_size, **ray_options)
        return tf_dataset_of(lambda: iter(made), (feature_columns, label_columns), known)

    def read(self, batch_size: int | None, ray_options: Mapping[str, Any]) -> Iterator[Any]:
        """One epoch of rows, from where it is on."""
        if self._is_begun:  # a loop that was left early
            self._epoch, self._num_had = self._epoch + 1, 0
        self._num_loops += 1
        loop, skipped, self._is_begun, self._is_reading = self._num_loops, self._num_had, True, True
        options = {"batch_size": batch_size, "batch_format": "numpy", **self._repeatable(ray_options)}
        try:
            batches = iter(self._stream.iter_batches(**options))
            while (batch := self._next(batches)) is not None:
                rows = _rows_of(batch)
                if skipped >= len(rows):
                    skipped -= len(rows)
                    continue
                rows, skipped = rows.slice(skipped, len(rows)), 0
                self._num_had += len(rows)
                yield rows
        finally:
            self._is_reading = self._is_reading and loop != self._num_loops
        self._epoch, self._num_had, self._is_begun = self._epoch + 1, 0, False

    def _repeatable(self, ray_options: Mapping[str, Any]) -> dict[str, Any]:
        """With a seed for what Ray would draw."""
        if ray_options.get("local_shuffle_buffer_size") is None or ray_options.get("local_shuffle_seed") is not None:
            return dict(ray_options)
        seed = derived_seed("ray", self._seed(), self._epoch, self.rank)
        return {**ray_options, "local_shuffle_seed": seed}

    def _next(self, batches: Iterator[Any]) -> Any:
        begin = time.perf_counter()
        try:
            return next(batches, None)
        finally:
            self.wait_s += time.perf_counter() - begin

    @property
    def epoch(self) -> int:
        """The epoch that is under way, or comes next."""
        return self._epoch + (self._is_begun and not self._is_reading)

    def state(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "rows": self._num_had, "rank": self.rank, "world_size": self.world_size}

    def go_on(self, states: Sequence[Mapping[str, Any]]) -> None:
        """From what all ranks have saved."""
        self._epoch, self._num_had = position_in_batches(states, self.rank, self.world_size)
        self._is_begun = self._is_reading = False

    def close(self) -> None:
        """The driver ends the stream."""

    def __getattr__(self, name: str) -> Any:
        if name == "_stream":  # not set yet: a copy is being made
            raise AttributeError(name)
        return getattr(self._stream, name)

    def __repr__(self) -> str:
        return f"RayShard({self._stream!r}, epoch {self._epoch})"


def _rows_of(batch: Mapping[str, Any]) -> Rows:
    """Columns; or, of `ray.data.from_torch`, the objects that the torch dataset gives, each as it is."""
    items: Any = batch["item"] if list(batch) == ["item"] else ()
    if len(items) and (isinstance(items[0], tuple) or type(items[0]).__module__ == "torch"):
        return Samples(list(items))
    return from_batch(batch, "the Ray dataset")


class RayBatches:
    """Loop over it: each loop is an epoch, or as many as were asked for."""

    def __init__(
        self, shard: RayShard, form: Form, batch_size: int | None, epochs: int | None, ray_options: Mapping[str, Any]
    ):
        self._shard, self._form, self._batch_size = shard, form, batch_size
        self._epochs, self._ray_options = epochs, ray_options

    def __iter__(self) -> Iterator[Any]:
        while self._epochs is None or self._shard.epoch < self._epochs:
            for rows in self._shard.read(self._batch_size, self._ray_options):
                yield self._form.batch(self._form.finish(rows))
            if self._epochs is None:
                return
