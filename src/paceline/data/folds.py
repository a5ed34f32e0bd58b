"""Cross-validation: a dataset as pairs of views, in which each row is for validation once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from paceline.data.base import Blocks, Indexed, Stream
from paceline.data.dataset import Dataset
from paceline.data.fold_columns import Part, Rule, check_columns, read_columns, splits_of
from paceline.data.given import is_rays
from paceline.data.making import as_dataset
from paceline.data.membership import NOWHERE, InFold, OnRoll, Roll, Subset
from paceline.data.ops import Limit, Op
from paceline.data.seeds import derived_seed
from paceline.data.tree import Leaf, has_limit, leaves, with_leaves
from paceline.errors import ArgumentError, ArgumentTypeError

_MAX_SEED = 2**32 - 1

View = Callable[[int, bool], Leaf]
"""What becomes of a leaf in a fold: for validation, or for training."""


def to_cv(
    dataset: Any,
    splits: int = 5,
    shuffle: bool = False,
    stratify: str | None = None,
    groups: str | None = None,
    seed: int = 0,
) -> list[tuple[Dataset, Dataset]]:
    """Pairs (train, val) of datasets: each row is in one `val`, and in all other `train`s. They are views; no row is
    copied. Loop over them, or give the list to `run(dataset=...)` and loop over `get_datasets()` there.

    Where rows have an index, scikit-learn's splitters decide. Rows of files and streams, and those that pass a filter,
    go by their numbers: nothing is read for that, and folds are about equally large.

    Args:
        dataset: a Dataset, or anything that `run(dataset=...)` takes but Ray's.
        splits: how many folds.
        shuffle: draw the folds at random. Without it those of rows with an index follow each other; the others are
            drawn in any case.
        stratify: a column of classes: each fold has about the same share of each. Of files, that column is read.
        groups: a column: rows with the same value stay together. Of files, that column is read; of streams, a hash of
            the value decides, so that some folds may be empty if there are few groups.
        seed: of what is drawn.
    """
    rule = _checked(splits, shuffle, stratify, groups, seed)
    if is_rays(dataset):
        raise ArgumentTypeError("to_cv(): folds of a Ray dataset are not known; cut the data that it is read from.")
    whole = as_dataset(dataset)
    if has_limit(whole.tree):
        raise ArgumentError(
            "to_cv() cannot come after .limit() of rows that are shuffled, mixed or a stream: which rows these are is "
            "another question in each epoch. Limit first, or limit the folds."
        )
    every = leaves(whole.tree)
    views = _by_column(every, rule) if rule.columns else [_by_number(leaf, rule) for leaf in every]

    def part(fold: int, is_validation: bool) -> Dataset:
        made = (view(fold, is_validation) for view in views)
        return whole._with(with_leaves(whole.tree, lambda _: next(made)))

    return [(part(fold, False), part(fold, True)) for fold in range(rule.splits)]


def _checked(splits: Any, shuffle: Any, stratify: Any, groups: Any, seed: Any) -> Rule:
    if isinstance(splits, bool) or not isinstance(splits, int) or splits < 2:
        raise ArgumentError(f"splits={splits!r}: expected a whole number, at least 2.")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= _MAX_SEED:
        raise ArgumentError(f"seed={seed!r}: expected a whole number from 0 to {_MAX_SEED}.")
    if not isinstance(shuffle, bool):
        raise ArgumentTypeError(f"shuffle={shuffle!r} is a {type(shuffle).__name__}; expected True or False.")
    for name, value in (("stratify", stratify), ("groups", groups)):
        if value is not None and not isinstance(value, str):
            raise ArgumentTypeError(f"{name}= is a {type(value).__name__}; expected the name of a column.")
    return Rule(splits, shuffle, stratify, groups, seed)


def _by_number(leaf: Leaf, rule: Rule) -> View:
    if isinstance(leaf.source, Indexed) and not any(op.drops_rows for op in leaf.ops):
        return _subset(leaf, splits_of(len(leaf.source), rule, (), leaf.name), leaf.ops)
    known = _num_rows(leaf)
    if known is not None and known < rule.splits:
        raise ArgumentError(f"splits={rule.splits}: {leaf.name} has {known} rows; expected at most so many splits.")
    return _ruled(leaf, rule)


def _by_column(every: Sequence[Leaf], rule: Rule) -> list[View]:
    """All leaves at once: those that are mixed may have groups in common."""
    streams = [leaf for leaf in every if isinstance(leaf.source, Stream)]
    if streams and rule.stratify is not None:
        raise ArgumentError(
            f"stratify={rule.stratify!r}: {streams[0].name} can only be read from its first row on, and all classes "
            "have to be known before. Use a map-style dataset or files, or leave out stratify."
        )
    if streams:
        for leaf in every:
            check_columns(leaf, rule)
        return [_ruled(leaf, rule) for leaf in every]
    parts = [read_columns(leaf, rule) for leaf in every]
    sizes = [sum(len(part.places) for part in found) for found in parts]
    folds = splits_of(
        sum(sizes), rule, [part for found in parts for part in found], ", ".join(leaf.name for leaf in every)
    )
    ends = np.cumsum(sizes)
    return [
        _on_roll(leaf, found, folds[end - size : end])
        for leaf, found, size, end in zip(every, parts, sizes, ends, strict=True)
    ]


def _ruled(leaf: Leaf, rule: Rule) -> View:
    depth = sum(isinstance(op, InFold) for op in leaf.ops)  # folds of a fold must not be the same ones again
    seed = derived_seed("folds", rule.seed, depth)

    def view(fold: int, is_validation: bool) -> Leaf:
        op = InFold(fold, rule.splits, is_validation, seed, rule.groups)
        ops = _placed(leaf.ops, op) if rule.groups is None else (*leaf.ops, op)
        return replace(leaf, name=_name(leaf, fold, is_validation), ops=ops)

    return view


def _on_roll(leaf: Leaf, parts: Sequence[Part], folds: Any) -> View:
    blocks: dict[int, tuple[int, Any]] = {}
    size = len(leaf.source) if isinstance(leaf.source, Indexed) else 0
    whole = np.full(size, NOWHERE, folds.dtype)
    for part in parts:
        own, folds = folds[: len(part.places)], folds[len(part.places) :]
        if isinstance(leaf.source, Blocks):
            of_block = np.full(part.places.max(initial=-1) + 1, NOWHERE, own.dtype)
            of_block[part.places] = own
            blocks[part.block] = (part.first_id, of_block)
        else:
            whole[part.places] = own
    if isinstance(leaf.source, Indexed):  # who passes the filters is known now
        return _subset(leaf, whole, tuple(op for op in leaf.ops if not op.drops_rows))
    roll = Roll(blocks)

    def view(fold: int, is_validation: bool) -> Leaf:
        ops = _placed(leaf.ops, OnRoll(fold, is_validation, roll))
        return replace(leaf, name=_name(leaf, fold, is_validation), ops=ops)

    return view


def _subset(leaf: Leaf, folds: Any, ops: tuple[Op, ...]) -> View:
    source = leaf.source
    assert isinstance(source, Indexed)

    def view(fold: int, is_validation: bool) -> Leaf:
        part = Subset(source, folds, fold, is_validation)
        return replace(leaf, source=part, name=_name(leaf, fold, is_validation), ops=ops)

    return view


def _placed(ops: tuple[Op, ...], op: Op) -> tuple[Op, ...]:
    """As early as it may be, so that nothing is done to rows of other folds. Not before a limit, which counts them."""
    place = max((number + 1 for number, one in enumerate(ops) if isinstance(one, Limit)), default=0)
    return (*ops[:place], op, *ops[place:])


def _name(leaf: Leaf, fold: int, is_validation: bool) -> str:
    return f"fold {fold} of {leaf.name}, for {'validation' if is_validation else 'training'}"


def _num_rows(leaf: Leaf) -> int | None:
    """None if it is known only when they are read. What is dropped later is not looked at: there are no more."""
    if isinstance(leaf.source, Indexed):
        return len(leaf.source)
    sizes = [block.rows for block in leaf.source.blocks()] if isinstance(leaf.source, Blocks) else [None]
    return None if None in sizes else sum(filter(None, sizes))
