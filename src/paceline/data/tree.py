"""What a dataset is made of, as values: sources, what is done to their rows, and how they are put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from paceline.data.base import Block, Source
from paceline.data.ops import Op
from paceline.errors import ArgumentError

MOST_LEAVES = 127
"""The number of a row has seven bits for the dataset that it is from."""

_ROWS_PER_BYTE = 0.01
"""A guess, where nobody knows how many rows a block has."""


@dataclass(frozen=True)
class Shuffle:
    window: int | None = None
    seed: int | None = None


@dataclass(frozen=True)
class Leaf:
    """One source. `lanes` is in how many places it is read at once."""

    source: Source
    name: str
    ops: tuple[Op, ...] = ()
    shuffle: Shuffle | None = None
    lanes: int = 8
    number: int = 0
    """Among the leaves of a tree."""
    id_column: str | None = None
    """By which the run that reads it names rows."""

    def stages(self) -> tuple[tuple[Op, ...], tuple[Op, ...]]:
        """What is done when a block is read, since it may drop rows; and what is done to a rank's rows of a batch,
        which spares the work for the rows of others."""
        last = max((place + 1 for place, op in enumerate(self.ops) if op.drops_rows), default=0)
        return self.ops[:last], self.ops[last:]

    def blocks_per_unit(self, blocks: Sequence[Block]) -> int:
        """How many blocks are mixed with each other, so that they have as many rows as the window asks for."""
        if self.shuffle is None or self.shuffle.window is None or not blocks:
            return 1
        sizes = [block.rows if block.rows is not None else block.weight * _ROWS_PER_BYTE for block in blocks]
        average = max(1.0, sum(sizes) / len(sizes))
        return max(1, round(self.shuffle.window / average + 0.499))


@dataclass(frozen=True)
class Mixture:
    children: tuple[Tree, ...]
    weights: tuple[int, ...]


@dataclass(frozen=True)
class Repeated:
    child: Tree
    times: int


@dataclass(frozen=True)
class First:
    child: Tree
    size: int


Tree = Leaf | Mixture | Repeated | First


def leaves(tree: Tree) -> list[Leaf]:
    match tree:
        case Leaf():
            return [tree]
        case Mixture(children, _):
            return [leaf for child in children for leaf in leaves(child)]
        case Repeated(child, _) | First(child, _):
            return leaves(child)


def with_leaves(tree: Tree, change: Callable[[Leaf], Tree]) -> Tree:
    match tree:
        case Leaf():
            return change(tree)
        case Mixture(children, weights):
            return Mixture(tuple(with_leaves(child, change) for child in children), weights)
        case Repeated(child, times):
            return Repeated(with_leaves(child, change), times)
        case First(child, size):
            return First(with_leaves(child, change), size)


def numbered(tree: Tree) -> Tree:
    """With the leaves counted."""
    counter = count()
    made = with_leaves(tree, lambda leaf: replace(leaf, number=next(counter)))
    if next(counter) > MOST_LEAVES:
        raise ArgumentError(f"At most {MOST_LEAVES} datasets can be mixed: put those of one kind together.")
    return made


def has_limit(tree: Tree) -> bool:
    match tree:
        case First():
            return True
        case Mixture(children, _):
            return any(map(has_limit, children))
        case Repeated(child, _):
            return has_limit(child)
    return False


def describe(tree: Tree) -> Any:
    match tree:
        case Leaf():
            made: dict[str, Any] = {"source": tree.source.describe()}
            if tree.ops:
                made["ops"] = [type(op).__name__ for op in tree.ops]
            if tree.shuffle is not None:
                made["shuffle"] = {"window": tree.shuffle.window, "seed": tree.shuffle.seed}
            return made
        case Mixture(children, weights):
            return {"mix": [describe(child) for child in children], "weights": list(weights)}
        case Repeated(child, times):
            return {"repeat": times, "of": describe(child)}
        case First(child, size):
            return {"limit": size, "of": describe(child)}
