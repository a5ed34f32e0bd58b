"""Data that is described, not read: where rows come from and what is done to them. Reading begins in a shard."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from hashlib import blake2b
from math import lcm
from typing import Any, Protocol

from paceline.data.base import Source, Stream
from paceline.data.formats import check_format
from paceline.data.ops import Filter, Limit, Map, MapBatches, Op, Select
from paceline.data.plan import known_size
from paceline.data.shard import Batches, Shard
from paceline.data.tree import (
    First,
    Leaf,
    Mixture,
    Repeated,
    Shuffle,
    Tree,
    describe,
    has_limit,
    leaves,
    numbered,
    with_leaves,
)
from paceline.errors import ArgumentError, ArgumentTypeError

LANES = 8


class Binding(Protocol):
    """A run's side of it: makes the shards that the run keeps the position of."""

    def shard(self, dataset: Dataset, rank: int | None) -> Shard: ...


class Dataset:
    """Rows to come. Each method gives a new dataset; nothing is read before a batch is asked for.

    Give it to `Trainer.run(dataset=...)` and ask for `get_data_shard()` in the function; or loop over it right here:
    `for batch in dataset.iter_batches(64)`.
    """

    def __init__(self, tree: Tree, binding: Binding | None = None):
        self.tree, self._binding = numbered(tree), binding

    def _with(self, tree: Tree) -> Dataset:
        return Dataset(tree, self._binding)

    def _then(self, op: Op) -> Dataset:
        return self._with(with_leaves(self.tree, lambda leaf: replace(leaf, ops=(*leaf.ops, op))))

    def filter(self, condition: Any, *, columns: Sequence[str] | None = None) -> Dataset:
        """Keep the rows for which the function is true, or an Arrow expression (`pyarrow.compute.field("x") > 0`).

        A function gets a dict, or whatever a row of the dataset is. Every rank has to know how many rows pass in all of
        the data; with an expression it reads only the columns that this needs, and with a function those that you name
        in `columns`, if it looks at no others.
        """
        _check_callable("filter", condition, or_expression=True)
        if has_limit(self.tree):
            raise ArgumentError(
                ".filter() cannot come after .limit() of rows that are shuffled, mixed or a stream: filter first."
            )
        return self._then(Filter(condition, None if columns is None else list(columns)))

    def map(self, fn: Callable[[Any], Any]) -> Dataset:
        """Let a function make another row of each. It gets a dict, or whatever a row of the dataset is. Random draws
        belong to `paceline.data.sample_rng(row)`."""
        return self._then(Map(_check_callable("map", fn)))

    def map_batches(self, fn: Callable[[Any], Any], *, batch_format: str = "numpy", batch_size: int = 1024) -> Dataset:
        """The same for many rows at once, at most `batch_size`: the function returns as many as it gets."""
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ArgumentError(f"batch_size={batch_size!r}: expected a whole number, at least 1.")
        return self._then(MapBatches(_check_callable("map_batches", fn), check_format(batch_format), batch_size))

    def select_columns(self, names: str | Sequence[str]) -> Dataset:
        chosen = (names,) if isinstance(names, str) else tuple(names)
        for leaf in leaves(self.tree):
            known = leaf.source.column_names()
            missing = [name for name in chosen if known is not None and name not in known]
            if missing and not any(isinstance(op, Map | MapBatches) for op in leaf.ops):
                raise ArgumentError(
                    f"There is no column {missing[0]!r} in {leaf.name}; there are {', '.join(known or ())}."
                )
        return self._then(Select(chosen))

    def random_shuffle(self, *, window: int | None = None, seed: int | None = None) -> Dataset:
        """Another order in every epoch. What has an index is shuffled as a whole. Of files, the row groups are, and the
        rows within each; `window` is how many rows, of several row groups, are mixed with each other. Without a seed it
        is that of `enable_reproducibility`, else 0."""
        if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
            raise ArgumentError(f"window={window!r}: expected a number of rows, at least 1.")
        for leaf in leaves(self.tree):
            if isinstance(leaf.source, Stream):
                raise ArgumentError(
                    f"{leaf.name} can only be read from its first row on: shuffle it where it is made, or use a "
                    "map-style dataset or files."
                )
        return self._with(with_leaves(self.tree, lambda leaf: replace(leaf, shuffle=Shuffle(window, seed))))

    def repeat(self, times: int) -> Dataset:
        """Each row so many times in an epoch, in rounds that are shuffled differently."""
        if isinstance(times, bool) or not isinstance(times, int) or times < 1:
            raise ArgumentError(f"repeat({times!r}): expected a whole number, at least 1.")
        return self._with(Repeated(self.tree, times))

    def limit(self, size: int) -> Dataset:
        """The first rows of the data; of rows that are shuffled or mixed already, the first ones of each epoch."""
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ArgumentError(f"limit({size!r}): expected a whole number, at least 1.")
        tree = self.tree
        if isinstance(tree, Leaf) and tree.shuffle is None and not isinstance(tree.source, Stream):
            return self._then(Limit(size))
        return self._with(First(tree, size))

    # --- in a worker, and outside of one ------------------------------------------------------------------------------

    def get_split(self) -> Shard:
        """This rank's part; outside of a run, all of it."""
        return self.get_shard(None)

    def get_shard(self, rank: int | None = None) -> Shard:
        """That rank's part."""
        return Shard(self.tree) if self._binding is None else self._binding.shard(self, rank)

    def iter_batches(self, batch_size: int | None = None, batch_format: str = "numpy", **options: Any) -> Batches:
        """Of all rows, in this process. See `Shard.iter_batches`."""
        return Shard(self.tree).iter_batches(batch_size, batch_format, **options)

    def iter_torch_batches(self, batch_size: int | None = None, **options: Any) -> Batches:
        return Shard(self.tree).iter_torch_batches(batch_size, **options)

    def to_torch(self, batch_size: int | None = None, *, locality_hint: Any = None, **options: Any) -> Any:
        """`locality_hint` may be a `paceline.driven.WorkerGroup`: its workers read then, as by `batches()`."""
        if locality_hint is not None:
            return locality_hint.batches(self, batch_size, **options)
        return Shard(self.tree).to_torch(batch_size, **options)

    def to_tf(self, feature_columns: Any, label_columns: Any, **options: Any) -> Any:
        return Shard(self.tree).to_tf(feature_columns, label_columns, **options)

    def num_rows(self) -> int | None:
        """How many rows an epoch has; None if nobody knows before they are read."""
        return known_size(self.tree)

    def bound(self, binding: Binding) -> Dataset:
        return Dataset(self.tree, binding)

    def in_place_of(self, other: Dataset) -> Dataset:
        """For the run that the other one is bound to, if it is."""
        return Dataset(self.tree, other._binding)

    def fingerprint(self) -> str:
        """By which a checkpoint knows the data that its position is in: what decides which rows come when."""
        return blake2b(repr(_structure(self.tree)).encode(), digest_size=16).hexdigest()

    def identity(self) -> str:
        """Two that give the same have the same, also if they were made anew."""
        parts = [
            [getattr(leaf.source, "identity", ""), *(op.identity for op in leaf.ops)] for leaf in leaves(self.tree)
        ]
        return f"{self.fingerprint()} {parts}"

    def describe(self) -> Any:
        return describe(self.tree)

    def __getstate__(self) -> dict[str, Any]:
        return {"tree": self.tree, "_binding": None}

    def __repr__(self) -> str:
        return f"Dataset({', '.join(leaf.name for leaf in leaves(self.tree))})"


def dataset_of(source: Source, name: str, lanes: int = LANES) -> Dataset:
    if isinstance(lanes, bool) or not isinstance(lanes, int) or lanes < 1:
        raise ArgumentError(f"lanes={lanes!r}: expected a whole number, at least 1.")
    return Dataset(Leaf(source, name, lanes=lanes))


def mix(weights: Mapping[Dataset, float]) -> Dataset:
    """Rows of several datasets, in these proportions. One that has no more rows in an epoch is left out, and the others
    go on: every row of each comes once. `.repeat()` lets one come more often, `.limit()` ends an epoch early."""
    if not isinstance(weights, Mapping) or not weights:
        raise ArgumentTypeError("mix() expects a dict with datasets and their weights: mix({a: 0.7, b: 0.3}).")
    for one, weight in weights.items():
        if not isinstance(one, Dataset):
            raise ArgumentTypeError(f"mix(): {one!r} is a {type(one).__name__}; expected a paceline.data.Dataset.")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < float("inf"):
            raise ArgumentError(f"mix(): the weight {weight!r} of {one!r} is not a positive number.")
    fractions = [Fraction(weight).limit_denominator(10**6) for weight in weights.values()]
    unit = lcm(*(fraction.denominator for fraction in fractions))
    return Dataset(Mixture(tuple(one.tree for one in weights), tuple(max(1, int(f * unit)) for f in fractions)))


def _structure(tree: Tree) -> Any:
    """What decides which rows come when, without functions that make other rows of them, which may be mended."""
    match tree:
        case Leaf():
            return (
                tree.source.fingerprint(),
                [op.identity for op in tree.ops if op.drops_rows],
                tree.shuffle,
                tree.lanes,
            )
        case Mixture(children, weights):
            return ("mix", [_structure(child) for child in children], weights)
        case Repeated(child, times):
            return ("repeat", _structure(child), times)
        case First(child, size):
            return ("first", _structure(child), size)


def _check_callable(name: str, fn: Any, or_expression: bool = False) -> Any:
    is_expression = or_expression and type(fn).__module__.startswith("pyarrow")
    if not callable(fn) and not is_expression:
        raise ArgumentTypeError(
            f".{name}({fn!r}): expected a function{' or an Arrow expression' if or_expression else ''}, got a "
            f"{type(fn).__name__}."
        )
    return fn
