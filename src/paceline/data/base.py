"""What a kind of dataset is: where rows come from, in one of three ways.

    Indexed   any rows by their numbers: arrays, frames, map-style datasets
    Blocks    many rows at once, block by block: files
    Stream    one row after the other, from the first on: iterable datasets

What happens to the rows afterwards, in which order they come and who gets them, is the same for all kinds.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from paceline.data.rows import Rows


class Source(Protocol):
    """It travels to the workers by pickle: large data stays where it is, and is opened there."""

    def fingerprint(self) -> str:
        """The same for the same data. A position is only good for the data that it was taken in."""
        ...

    def describe(self) -> Any:
        """For the run folder."""
        ...

    def column_names(self) -> list[str] | None:
        """None if the rows are no columns, or nobody knows before they are read."""
        ...


@runtime_checkable
class Indexed(Source, Protocol):
    def __len__(self) -> int: ...

    def take(self, indices: Any) -> Rows:
        """The rows with these numbers, in this order."""
        ...


@dataclass(frozen=True)
class Block:
    """A piece of the data that is read as a whole. `rows` is None if nobody knows before it is read; `weight` says how
    large it is beside others."""

    number: int
    name: str
    rows: int | None
    weight: int
    first_row: int | None = None
    """The number of its first row in the whole data, if it is known."""

    @property
    def first_id(self) -> int:
        return self.number << 32 if self.first_row is None else self.first_row


@runtime_checkable
class Blocks(Source, Protocol):
    def blocks(self) -> Sequence[Block]:
        """In the order of the data."""
        ...

    def read(self, block: Block, columns: Sequence[str] | None) -> Rows:
        """All rows of it, in order; of these columns if some are named. Called by several threads."""
        ...


@runtime_checkable
class Parted(Blocks, Protocol):
    """Blocks so large that nobody should wait for a whole one at the beginning."""

    def parted(self, block: Block) -> tuple[Block, Block] | None:
        """Its first rows, which are read quickly, and the rest, as blocks with numbers of their own. None if it is
        better read at once."""
        ...


@runtime_checkable
class Stream(Source, Protocol):
    def open(self, skip: int, epoch: int) -> Iterator[Any]:
        """Rows in an order that is the same each time, without the first `skip`."""
        ...
