"""CSV files and files of JSON lines: a block is a stretch of whole lines."""

from __future__ import annotations

import io
import logging
from collections.abc import Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import Any

from paceline.data.base import Block
from paceline.data.kinds.files import File, Files, in_parallel
from paceline.data.rows import Columns, check_names, from_arrow
from paceline.errors import ArgumentError, DataError

logger = logging.getLogger(__name__)

BLOCK_BYTES = 16 << 20
_LOOK_BYTES = 1 << 16
_COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}


_OTHERWISE = "Columns and types are those of the first block; schema=... says what they are, if that does not show it"


class TextSource:
    """Columns and types are those of the first block, unless they are given. Where lines end is looked up at each
    block's beginning, when the source is made. A compressed file is one block."""

    kind: str

    def __init__(self, files: Files, block_bytes: int | None = None, schema: Any = None):
        self._files = files
        size = _checked(block_bytes, schema)
        self._blocks: list[Block] = []
        self._places: list[tuple[int, int, int]] = []
        """Of each block: its file, and from where to where."""
        for number, stretches in enumerate(in_parallel(lambda file: self._stretches(file, size), files)):
            for start, stop in stretches:
                name = f"{files[number].path}, bytes {start} to {stop}"
                self._places.append((number, start, stop))
                self._blocks.append(Block(len(self._blocks), name, None, stop - start))
        if not self._blocks:
            raise DataError(f"{files}: there are no rows in {'it' if len(files) == 1 else 'them'}.")
        self._schema = schema if schema is not None else self._first_schema()
        check_names(self._schema.names, files)

    @staticmethod
    def takes(value: Any) -> bool:
        return False  # it is made by read_csv and read_json

    def _parsed(self, content: bytes, file: File, columns: Sequence[str] | None, schema: Any) -> Any:
        raise NotImplementedError  # abstract

    def _start_of(self, file: File) -> int:
        """Where the rows begin."""
        return 0

    def _first_schema(self) -> Any:
        number, start, stop = self._places[0]
        file = self._files[number]
        content = file.part("its beginning", lambda: file.bytes(start, stop))
        return file.part("its beginning", lambda: self._parsed(content, file, None, None)).schema

    def _stretches(self, file: File, block_bytes: int) -> list[tuple[int, int]]:
        if _compression(file):
            return [(0, file.size)] if file.size else []
        begin = file.part("its first line", lambda: self._start_of(file))
        cuts = [begin]
        for wanted in range(begin + block_bytes, file.size, block_bytes):
            if wanted > cuts[-1]:
                end = file.part(f"byte {wanted}", lambda wanted=wanted: _next_line(file, wanted))  # type: ignore[misc]
                cuts.append(end)
        cuts.append(file.size)
        return [(start, stop) for start, stop in pairwise(cuts) if stop > start]

    def blocks(self) -> Sequence[Block]:
        return self._blocks

    def read(self, block: Block, columns: Sequence[str] | None) -> Columns:
        number, start, stop = self._places[block.number]
        file = self._files[number]
        names = self.column_names()
        missing = [name for name in columns or () if name not in names]
        if missing:
            raise DataError(f"{file.path} has no column {missing[0]!r}; it has {', '.join(names)}.")
        part = block.name.removeprefix(f"{file.path}, ")
        content = file.part(part, lambda: file.bytes(start, stop))
        if stop < file.size and not content.endswith(b"\n"):
            raise DataError(
                f"{file.path}: {part} do not end with a line any more. The file was written anew since the dataset was "
                "made: make it anew, too."
            )
        wanted = names[:1] if columns is not None and not columns else columns  # to count rows, one will do
        table = file.part(part, lambda: self._parsed(content, file, wanted, self._schema), _OTHERWISE)
        chosen = names if columns is None else list(columns)
        lacking = [name for name in chosen if name not in table.schema.names]
        if lacking:
            raise DataError(f"{file.path} has no column {lacking[0]!r}; it has {', '.join(table.schema.names)}.")
        return from_arrow(table.select(chosen))  # each file has its order

    def column_names(self) -> list[str]:
        return list(self._schema.names)

    def fingerprint(self) -> str:
        digest = blake2b(digest_size=16)
        for file in self._files:
            digest.update(f"{file.name} {file.size}\n".encode())
        digest.update(repr(self._places).encode())
        return digest.hexdigest()

    def describe(self) -> dict[str, Any]:
        return {"kind": self.kind, "files": self._files.describe(), "columns": self.column_names()}


class CsvSource(TextSource):
    """The first line has the names, unless they are given. Text in quotes must not contain line ends, unless the file
    is read as one block: `newlines_in_values=True`."""

    kind = "csv"

    def __init__(
        self,
        files: Files,
        delimiter: str = ",",
        newlines_in_values: bool = False,
        block_bytes: int | None = None,
        schema: Any = None,
        column_names: Sequence[str] | None = None,
    ):
        if not isinstance(delimiter, str) or len(delimiter.encode()) != 1:
            raise ArgumentError(f"delimiter={delimiter!r}: expected one letter, of one byte.")
        self._delimiter, self._newlines = delimiter, newlines_in_values
        self._given_names = None if column_names is None else list(column_names)
        self._headers: dict[str, bytes] = {}
        whole = max(file.size for file in files) + 1 if newlines_in_values else block_bytes
        super().__init__(files, whole, schema)
        self._check_headers()
        if self._given_names is None and _is_a_row(self.column_names()):
            logger.warning(
                "%s: its first line holds numbers only, %s, and is taken for the names of the columns. If the file has "
                "none, say column_names=[...].",
                files,
                ", ".join(self.column_names()[:3]),
            )

    def _start_of(self, file: File) -> int:
        if self._given_names is not None:
            self._headers[file.path] = b""
            return 0
        end = _next_line(file, 0)
        self._headers[file.path] = file.bytes(0, end)
        return end

    def _check_headers(self) -> None:
        headers = [(file.path, self._headers[file.path].strip()) for file in self._files if file.path in self._headers]
        for path, header in headers:
            first, expected = headers[0]
            if header != expected:
                raise DataError(
                    f"The first line of {path} is {header[:200]!r}, that of {first} {expected[:200]!r}; expected the "
                    "same columns in all files."
                )

    def _parsed(self, content: bytes, file: File, columns: Sequence[str] | None, schema: Any) -> Any:
        from pyarrow import csv

        kind = _compression(file)
        header = b"" if kind else self._headers[file.path]
        if header and not header.endswith(b"\n"):
            header += b"\n"
        types = None if schema is None else {field.name: field.type for field in schema}
        return csv.read_csv(
            _plain(header + content, kind),
            read_options=csv.ReadOptions(
                block_size=max(1 << 20, len(header) + len(content) + 1), column_names=self._given_names
            ),
            parse_options=csv.ParseOptions(delimiter=self._delimiter, newlines_in_values=self._newlines),
            convert_options=csv.ConvertOptions(
                column_types=types, include_columns=None if columns is None else list(columns)
            ),
        )


class JsonSource(TextSource):
    """One object on each line."""

    kind = "json"

    def _parsed(self, content: bytes, file: File, columns: Sequence[str] | None, schema: Any) -> Any:
        import pyarrow as pa
        from pyarrow import json

        table = json.read_json(
            _plain(content, _compression(file)),
            read_options=json.ReadOptions(block_size=max(1 << 20, len(content) + 1)),
            parse_options=json.ParseOptions(
                explicit_schema=schema, unexpected_field_behavior="infer" if schema is None else "error"
            ),
        )
        if schema is not None and not isinstance(table, pa.Table):
            raise ArgumentError(f"{file.path}: expected one JSON object on each line.")
        table.validate(full=True)  # whether text is UTF-8: what reads CSV looks, and what reads JSON does not
        return table if columns is None else table.select(list(columns))


def _is_a_row(names: Sequence[str]) -> bool:
    """Whether they are numbers, and not all of them whole ones: columns may be counted, or be years."""
    try:
        return all(float(name) == float(name) for name in names) and not all(name.isdecimal() for name in names)
    except ValueError:
        return False


def _checked(block_bytes: Any, schema: Any) -> int:
    import pyarrow as pa

    size = BLOCK_BYTES if block_bytes is None else block_bytes
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ArgumentError(f"block_bytes={size!r}: expected a whole number, at least 1.")
    if schema is not None and not isinstance(schema, pa.Schema):
        raise ArgumentError(f"schema={schema!r}: expected a pyarrow.Schema.")
    return size


def _next_line(file: File, start: int) -> int:
    """Where the line after the one at that byte begins."""
    while start < file.size:
        stop = min(file.size, start + _LOOK_BYTES)
        place = file.bytes(start, stop).find(b"\n")
        if place >= 0:
            return start + place + 1
        start = stop
    return file.size


def _compression(file: File) -> str | None:
    return next((kind for ending, kind in _COMPRESSED.items() if file.path.endswith(ending)), None)


def _plain(content: bytes, compression: str | None) -> Any:
    import pyarrow as pa

    if compression is None:
        return io.BytesIO(content)
    return pa.CompressedInputStream(io.BytesIO(content), compression)
