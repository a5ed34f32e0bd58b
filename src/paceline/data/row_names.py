"""A row's name, where a column has it: `record_ids="id"`. Integers stand for themselves, text for a hash of it."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from paceline.data.permutation import scrambled
from paceline.data.rows import Columns, Rows
from paceline.errors import DataError

_LONG = 64
"""Characters. Text up to there is hashed many at a time."""


def names_of(rows: Rows, column: str, where: str) -> Any:
    """64 bits for each row, the same in every process."""
    if not isinstance(rows, Columns) or column not in rows.columns:
        has = f"has the columns {', '.join(rows.columns)}" if isinstance(rows, Columns) else "has rows without columns"
        raise DataError(
            f"record_ids={column!r} names a column, and {where} {has} where it is read. Name one of those, or say "
            "record_ids=True for the numbers of rows."
        )
    return as_names(rows.columns[column], column, where)


def as_names(values: Any, column: str, where: str) -> Any:
    """A numpy or Arrow column."""
    num_missing = getattr(values, "null_count", 0)
    array = values if isinstance(values, np.ndarray) else values.to_numpy(zero_copy_only=False)
    if array.dtype.kind in "iu" and array.ndim == 1:
        return array.astype(np.uint64).view(np.int64) if array.dtype == np.uint64 else array.astype(np.int64)
    is_text = array.dtype.kind == "U" or (array.dtype == object and all(map(str.__instancecheck__, array)))
    if num_missing or array.ndim != 1 or not is_text:
        what = f"{num_missing} missing values" if num_missing else f"values of type {array.dtype}"
        raise DataError(
            f"record_ids={column!r}: that column has {what} in {where}; expected an integer or text in every row, by "
            "which it is known."
        )
    return hashed(array)


def hashed(texts: Any) -> Any:
    """A number of 63 bits for each text, of the text alone: not of those beside it. No loop over short ones."""
    if not len(texts):
        return np.empty(0, np.int64)
    if texts.dtype.kind == "U" and texts.dtype.itemsize > 4 * _LONG:
        texts = texts.astype(object)
    if texts.dtype == object and max(map(len, texts)) > _LONG:
        is_long = np.fromiter(map(_LONG.__lt__, map(len, texts)), bool, len(texts))
        made = np.empty(len(texts), np.int64)
        made[~is_long] = hashed(texts[~is_long])
        made[is_long] = [_digest(text) for text in texts[is_long]]
        return made
    letters = texts.astype("U")
    width = max(1, -(-letters.dtype.itemsize // 8))
    words = letters.astype(f"U{2 * width}").view(np.int64).reshape(len(letters), width)  # two letters in each
    total = np.zeros(len(letters), np.int64)
    for place in range(width):
        # a word of zeros adds nothing, so that it does not matter how wide the longest text is
        total += scrambled(words[:, place], "text", place) - scrambled(np.zeros(1, np.int64), "text", place)
    return scrambled(total, "text")


def _digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest(), "big") >> 1


def with_column(columns: Sequence[str] | None, column: str | None, known: Sequence[str] | None) -> list[str] | None:
    """The columns to read, so that this one is among them; None: all there are."""
    if column is None or (columns is None and (known is None or column in known)):
        return None if columns is None else list(columns)
    every = list(known or ()) if columns is None else list(columns)
    return every if column in every else [*every, column]
