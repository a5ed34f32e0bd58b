"""Folds that follow from columns: what the rows' classes and groups are, and what scikit-learn makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.data.base import Blocks, Indexed
from paceline.data.membership import numbers_of
from paceline.data.ops import Context, Map, MapBatches, Select
from paceline.data.plan import BlockReader
from paceline.data.rows import Columns, Rows, Samples
from paceline.data.seeds import derived_seed
from paceline.data.tree import Leaf
from paceline.errors import ArgumentError, MissingDependencyError


@dataclass(frozen=True)
class Part:
    """Rows of one block of a leaf, or of all of an indexed one: which of its rows they are, from the first one on, and
    their values."""

    block: int
    first_id: int
    places: Any
    values: dict[str, Any]


@dataclass(frozen=True)
class Rule:
    """What was asked of `to_cv`."""

    splits: int
    shuffle: bool
    stratify: str | None
    groups: str | None
    seed: int

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(name for name in (self.stratify, self.groups) if name is not None))

    def named(self, column: str) -> str:
        return f"{'stratify' if column == self.stratify else 'groups'}={column!r}"


def read_columns(leaf: Leaf, rule: Rule) -> list[Part]:
    """Those that the rule names, of all rows that pass the leaf's filters. Reads nothing else, if it can."""
    source = leaf.source
    assert isinstance(source, Indexed | Blocks)
    check_columns(leaf, rule)
    is_plain = all(isinstance(op, Select) for op in leaf.ops)
    if is_plain and isinstance(source, Indexed) and hasattr(source, "column"):
        values = {name: _checked(source.column(name), name, leaf, rule) for name in rule.columns}
        return [Part(0, 0, np.arange(len(source)), values)]
    seed = leaf.shuffle.seed if leaf.shuffle is not None else None
    context = Context(leaf.name, derived_seed("draws", seed or 0, leaf.number))  # a filter may draw
    reader = BlockReader(leaf, leaf.ops, (), context, None, rule.columns, lambda rows: rows)
    numbers = numbers_of(source, np.arange(len(source))) if isinstance(source, Indexed) else None
    parts = []
    for block in reader.prepare({}):
        rows, ids = reader.read(block)
        ids = ids - reader.first_id
        values = {name: _checked(_values(rows, name, leaf, rule), name, leaf, rule) for name in rule.columns}
        if numbers is None:
            parts.append(Part(block.number, block.first_id, ids - block.first_id, values))
        else:
            parts.append(Part(0, 0, np.searchsorted(numbers, ids), values))
    return parts


def check_columns(leaf: Leaf, rule: Rule) -> None:
    """As far as it is known without reading which columns there are."""
    names = leaf.source.column_names()
    for op in leaf.ops:
        if isinstance(op, Select):
            names = list(op.names)
        elif isinstance(op, Map | MapBatches):
            names = None
    for name in rule.columns:
        if names is not None and name not in names:
            raise ArgumentError(_missing(name, names, leaf, rule))


def splits_of(num_rows: int, rule: Rule, parts: Sequence[Part], name: str) -> Any:
    """The number of the fold of each row, as scikit-learn's splitters decide. Of all parts together: a group may have
    rows in several."""
    try:
        from sklearn import model_selection
    except ImportError as error:
        raise MissingDependencyError("scikit-learn", "data", "to_cv() of these rows") from error
    if num_rows < rule.splits:
        raise ArgumentError(f"splits={rule.splits}: {name} has {num_rows} rows; expected at most so many splits.")
    classes, groups = (
        None if column is None else _codes([part.values[column] for part in parts])
        for column in (rule.stratify, rule.groups)
    )
    if groups is not None and groups.max() + 1 < rule.splits:
        raise ArgumentError(
            f"groups={rule.groups!r} has {groups.max() + 1} different values in {name}, and a group is never cut: "
            f"expected at least splits={rule.splits}."
        )
    if classes is not None and np.bincount(classes).max() < rule.splits:
        raise ArgumentError(
            f"stratify={rule.stratify!r}: no value of this column has splits={rule.splits} rows in {name}. Name a "
            "column of classes, or use fewer splits."
        )
    kind = {
        (False, False): model_selection.KFold,
        (True, False): model_selection.StratifiedKFold,
        (False, True): model_selection.GroupKFold,
        (True, True): model_selection.StratifiedGroupKFold,
    }[classes is not None, groups is not None]
    splitter = kind(rule.splits, shuffle=rule.shuffle, random_state=rule.seed if rule.shuffle else None)
    folds = np.empty(num_rows, np.min_scalar_type(-rule.splits))
    for fold, (_, chosen) in enumerate(splitter.split(np.zeros(num_rows, np.int8), classes, groups)):
        folds[chosen] = fold
        if not len(chosen):
            raise ArgumentError(
                f"splits={rule.splits}: with groups={rule.groups!r} and stratify={rule.stratify!r}, no rows of {name} "
                f"are left for fold {fold}. Use fewer splits, or one of the two."
            )
    return folds


def _values(rows: Rows, name: str, leaf: Leaf, rule: Rule) -> Any:
    if isinstance(rows, Columns) and name in rows.columns:
        return rows.columns[name]
    if isinstance(rows, Samples) and all(isinstance(sample, dict) and name in sample for sample in rows.samples):
        return [sample[name] for sample in rows.samples]
    raise ArgumentError(_missing(name, list(rows.columns) if isinstance(rows, Columns) else None, leaf, rule))


def _missing(name: str, names: Sequence[str] | None, leaf: Leaf, rule: Rule) -> str:
    if names is None:
        return (
            f"{rule.named(name)}: a row of {leaf.name} has no columns, or not this one. Let .map() make a dict of each "
            f"row, with {name!r} in it."
        )
    return f"{rule.named(name)}: there is no such column in {leaf.name}; there are {', '.join(map(repr, names))}."


def _checked(column: Any, name: str, leaf: Leaf, rule: Rule) -> Any:
    shape = getattr(column, "shape", (len(column),))
    if len(shape) > 1:
        raise ArgumentError(
            f"{rule.named(name)}: a value of this column of {leaf.name} is an array of the shape {shape[1:]}; expected "
            "one number or text for each row."
        )
    return column


def _codes(columns: Sequence[Any]) -> Any:
    """Equal values as equal numbers, from 0 on."""
    kinds = {column.dtype.kind if isinstance(column, np.ndarray) else "O" for column in columns}
    if len(kinds) == 1 and kinds != {"O"}:
        return np.unique(np.concatenate(columns), return_inverse=True)[1]
    known: dict[str, int] = {}  # by their text: a value may be a tensor, or missing
    codes = [known.setdefault(repr(value), len(known)) for column in columns for value in _plain(column)]
    return np.array(codes, dtype=np.int64)


def _plain(column: Any) -> list[Any]:
    if hasattr(column, "to_pylist"):
        return column.to_pylist()  # type: ignore[no-any-return]
    if isinstance(column, np.ndarray):
        return list(column.tolist())
    return [one.item() if hasattr(one, "item") else one for one in column]
