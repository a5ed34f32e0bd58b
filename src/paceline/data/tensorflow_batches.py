"""Batches as a `tf.data.Dataset`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from paceline.data.rows import Columns, as_numpy
from paceline.errors import ArgumentError, DataError, MissingDependencyError

try:
    import tensorflow as tf
except ImportError as missing:
    raise MissingDependencyError("tensorflow", "tensorflow", "shard.to_tf()") from missing


def tf_dataset(
    batches: Callable[[], Iterator[Any]], example: Columns, features: str | Sequence[str], labels: str | Sequence[str]
) -> Any:
    """One epoch of `batches` for each loop over it. `example` has a row, by which the types are known."""
    names = (features, labels)
    for name in [name for one in names for name in ([one] if isinstance(one, str) else one)]:
        if name not in example.columns:
            raise ArgumentError(f"to_tf(): there is no column {name!r}; there are {', '.join(example.columns)}.")
    first = {name: as_numpy(name, column) for name, column in example.columns.items()}
    return tf_dataset_of(batches, names, tuple(_signature(first, one) for one in names))


def tf_dataset_of(batches: Callable[[], Iterator[Any]], names: Sequence[str | Sequence[str]], signature: Any) -> Any:
    """The same, of types that are known."""

    def pairs() -> Iterator[Any]:
        for batch in batches():
            yield tuple(_chosen(batch, one) for one in names)

    made = tf.data.Dataset.from_generator(pairs, output_signature=signature)
    options = tf.data.Options()
    # The rows are this rank's already: sharding them once more would lose most of them.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    # TensorFlow would fetch a batch ahead of the loop, unasked: a checkpoint would count it as had, and nobody would
    # train on it after a kill. The shard reads ahead itself.
    options.experimental_optimization.inject_prefetch = False
    return made.with_options(options)


def _chosen(batch: dict[str, Any], names: str | Sequence[str]) -> Any:
    return batch[names] if isinstance(names, str) else {name: batch[name] for name in names}


def _signature(first: dict[str, Any], names: str | Sequence[str]) -> Any:
    if isinstance(names, str):
        return _spec(names, first[names])
    return {name: _spec(name, first[name]) for name in names}


def _spec(name: str, array: Any) -> Any:
    if array.dtype == object and not all(isinstance(value, str | bytes) for value in array):
        raise DataError(f"The column {name!r} holds values that are no tensor; make numbers of them with .map().")
    kind = tf.string if array.dtype == object or array.dtype.kind in "US" else tf.as_dtype(array.dtype)
    return tf.TensorSpec((None, *np.shape(array)[1:]), kind)
