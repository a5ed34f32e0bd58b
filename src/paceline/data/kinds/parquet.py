"""Parquet files: a block is a row group."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import reduce
from hashlib import blake2b
from operator import and_
from typing import Any

from paceline.data.base import Block
from paceline.data.kinds.files import File, Files, in_parallel
from paceline.data.rows import Columns, check_names, from_arrow, without_codes
from paceline.errors import ArgumentError, DataError

_MOST_OPEN = 64
_HEAD_SHARE = 16
"""A head is so much of a row group: enough for the first batches, while the rest is decoded."""
_LEAST_HEAD = 256


class ParquetSource:
    """What is known of the files, their row groups and columns, is read once, where it is made, and travels."""

    def __init__(self, files: Files, columns: Sequence[str] | None = None):
        self._files, self._columns = files, None if columns is None else list(columns)
        self._blocks: list[Block] = []
        self._places: list[tuple[int, int]] = []
        """Of each block: its file, and which row group of it."""
        self._names: list[str] = []
        self._open = threading.local()
        self._learn()

    @staticmethod
    def takes(value: Any) -> bool:
        return False  # it is made by read_parquet

    def _learn(self) -> None:
        footers = in_parallel(self._footer, self._files)
        schema, row = footers[0][0], 0
        self._names = list(schema.names)
        check_names(self._names, self._files[0].path)
        for number, (theirs, sizes) in enumerate(footers):
            _check_schema(self._files[0], schema, self._files[number], theirs)
            for group, num_rows in enumerate(sizes):
                if num_rows:
                    name = f"{self._files[number].path}, row group {group}"
                    self._places.append((number, group))
                    self._blocks.append(Block(len(self._blocks), name, num_rows, num_rows, row))
                row += num_rows
        if not row:
            raise DataError(f"{self._files}: there are no rows in {'it' if len(self._files) == 1 else 'them'}.")
        missing = [name for name in self._columns or () if name not in self._names]
        if missing:
            raise ArgumentError(f"columns: there is no {missing[0]!r} in {self._files}; there are {self._names}.")

    def _footer(self, file: File) -> tuple[Any, list[int]]:
        def read() -> tuple[Any, list[int]]:
            parquet = self._opened(file)
            meta = parquet.metadata
            return parquet.schema_arrow, [meta.row_group(number).num_rows for number in range(meta.num_row_groups)]

        return file.part("its footer", read)  # type: ignore[no-any-return]

    def blocks(self) -> Sequence[Block]:
        return self._blocks

    def parted(self, block: Block) -> tuple[Block, Block] | None:
        size = (block.rows or 0) // _HEAD_SHARE
        file = self._files[self._places[block.number][0]]
        if size < _LEAST_HEAD or not file.is_local:  # from afar, all of it would be fetched twice
            return None
        first, number = block.first_row or 0, len(self._blocks) + 2 * block.number
        rest = block.weight - size
        return (
            Block(number, f"{block.name}, its first {size} rows", size, size, first),
            Block(number + 1, f"{block.name}, from row {size} on", rest, rest, first + size),
        )

    def read(self, block: Block, columns: Sequence[str] | None) -> Columns:
        if block.number < len(self._blocks):
            return self._read(block.number, columns)
        place, is_rest = divmod(block.number - len(self._blocks), 2)
        whole = self._read(place, columns, None if is_rest else block.rows)
        return whole.slice(len(whole) - block.weight, len(whole)) if is_rest else whole

    def _read(self, place: int, columns: Sequence[str] | None, head: int | None = None) -> Columns:
        number, group = self._places[place]
        wanted = columns if columns is not None else self._columns
        table = without_codes(self._table(number, group, wanted, head))
        return from_arrow(table.select(list(wanted if wanted is not None else self._names)))  # each file has its order

    def _table(self, number: int, group: int, columns: Sequence[str] | None, head: int | None = None) -> Any:
        """Of a row group; with `head`, its first rows."""
        file = self._files[number]
        if columns is not None:
            missing = [name for name in columns if name not in self._names]
            if missing:
                raise DataError(f"{file.path} has no column {missing[0]!r}; it has {', '.join(self._names)}.")
        names = None if columns is None else list(columns)
        # One thread for each row group: lanes are read side by side. On two busy cores, threads for each column cost
        # more than they gave; with idle ones that may differ.

        def read() -> Any:
            parquet = self._opened(file)
            if head is None:
                return parquet.read_row_group(group, columns=names, use_threads=False)
            return next(parquet.iter_batches(head, row_groups=[group], columns=names, use_threads=False))

        return file.part(f"row group {group}", read)

    def _opened(self, file: File) -> Any:
        """An open file of this thread's own. After a failure it is opened anew."""
        import pyarrow.parquet as pq

        known: dict[str, Any] = self._open.__dict__.setdefault("files", {})
        if file.path not in known or file.is_failing:
            if len(known) >= _MOST_OPEN:
                known.pop(next(iter(known))).close()
            # Not mapped into memory: reading a mapped file that is cut off meanwhile is a signal (SIGBUS), which would
            # end the process. Mapping would spare a quarter of the time or more.
            # Checksums of pages are verified where a file has some: what is damaged else is read as other values.
            known[file.path] = pq.ParquetFile(
                file.open(), pre_buffer=not file.is_local, page_checksum_verification=True
            )
        return known[file.path]

    def count_matching(self, block: Block, conditions: Sequence[Any]) -> int:
        """How many rows of it satisfy Arrow expressions; reads only the columns that these name."""
        import pyarrow.dataset as ds
        import pyarrow.fs

        number, group = self._places[block.number]
        file = self._files[number]
        if not file.is_local:
            table = self._table(number, group, None)
            for condition in conditions:
                table = table.filter(condition)
            return int(table.num_rows)
        every = reduce(and_, conditions)

        def count() -> int:
            file.check()
            kind = ds.ParquetFileFormat()
            fragment = kind.make_fragment(file.path, pyarrow.fs.LocalFileSystem(), row_groups=[group])
            return int(fragment.count_rows(filter=every))

        return int(file.part(f"row group {group}", count))

    def column_names(self) -> list[str]:
        return self._columns or self._names

    def fingerprint(self) -> str:
        digest = blake2b(digest_size=16)
        for file in self._files:
            digest.update(f"{file.name} {file.size}\n".encode())
        digest.update(
            repr([(block.rows, place) for block, place in zip(self._blocks, self._places, strict=True)]).encode()
        )
        return digest.hexdigest()

    def describe(self) -> dict[str, Any]:
        rows = sum(block.rows or 0 for block in self._blocks)
        return {"kind": "parquet", "files": self._files.describe(), "num_rows": rows, "columns": self._names}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_open": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _open=threading.local())


def _check_schema(first: File, expected: Any, file: File, found: Any) -> None:
    ours, theirs = ({field.name: str(field.type) for field in one} for one in (expected, found))
    if ours == theirs:
        return
    differences = [
        f"{name!r} is {theirs.get(name, 'not there')} there and {ours.get(name, 'not there')} in {first.path}"
        for name in {**ours, **theirs}
        if ours.get(name) != theirs.get(name)
    ]
    raise DataError(
        f"The columns of {file.path} differ from those of the other files: {'; '.join(differences[:5])}. Read them "
        "apart and .mix() them after .select_columns(), or write them anew with one schema."
    )
