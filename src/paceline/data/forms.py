"""What a batch is to its user: arrays, frames, tables, tensors, or whatever a function of theirs makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from paceline.data.formats import to_batch
from paceline.data.rows import Rows, Samples


class Form(Protocol):
    """What a batch is to its user."""

    @property
    def columns(self) -> Sequence[str] | None:
        """Those that it takes; None: all."""
        ...

    @property
    def is_costly(self) -> bool:
        """Whether it is worth a thread of its own."""
        ...

    def finish(self, rows: Rows) -> Rows:
        """What can be done to many rows before they are cut into batches."""
        ...

    def batch(self, rows: Rows) -> Any: ...


@dataclass(frozen=True)
class Formatted:
    """Rows in one of the known formats, and then as a function of the user's likes them."""

    batch_format: str
    collate_fn: Callable[[Any], Any] | None = None
    columns: Sequence[str] | None = None

    @property
    def is_costly(self) -> bool:
        return self.collate_fn is not None

    def finish(self, rows: Rows) -> Rows:
        return rows

    def batch(self, rows: Rows) -> Any:
        if self.collate_fn is None:
            return to_batch(rows, self.batch_format)
        return self.collate_fn(to_batch(rows, self.batch_format, is_collated=True))


@dataclass(frozen=True)
class Raw:
    """Rows as they are."""

    columns: Sequence[str] | None = None
    is_costly: bool = False

    def finish(self, rows: Rows) -> Rows:
        return rows

    def batch(self, rows: Rows) -> Any:
        return rows


class RowByRow(Raw):
    def batch(self, rows: Rows) -> list[Any]:
        return [rows.row(index) for index in range(len(rows))]


@dataclass(frozen=True)
class CollatedRows:
    """Columns as tensors, or a list of rows, for a function of the user's."""

    collate_fn: Callable[[Any], Any]
    columns: Sequence[str] | None = None
    is_costly: bool = True

    def finish(self, rows: Rows) -> Rows:
        return rows

    def batch(self, rows: Rows) -> Any:
        if isinstance(rows, Samples):
            return self.collate_fn(list(rows.samples))
        return Formatted("torch", self.collate_fn).batch(rows)


def emptied(batch: Any) -> Any:
    """The same without rows: no tensor or array in it has any."""
    if getattr(batch, "shape", ()):
        return batch[:0]
    if isinstance(batch, dict):
        return {name: emptied(part) for name, part in batch.items()}
    if isinstance(batch, tuple | list) and any(_has_rows(part) for part in batch):
        return type(batch)(map(emptied, batch)) if type(batch) in (tuple, list) else type(batch)(*map(emptied, batch))
    return type(batch)() if isinstance(batch, tuple | list) else batch


def _has_rows(part: Any) -> bool:
    return bool(getattr(part, "shape", ())) or isinstance(part, dict | tuple | list)
