"""Arrow's tables."""

from __future__ import annotations

import sys
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np

from paceline.data.rows import Columns, check_names, from_arrow

_SAMPLE = 1024


class ArrowSource:
    def __init__(self, table: Any):
        self.table = table if hasattr(table, "combine_chunks") else _table_of(table)
        check_names(self.table.schema.names, "dataset: this table")

    @staticmethod
    def takes(value: Any) -> bool:
        pa = sys.modules.get("pyarrow")
        return pa is not None and isinstance(value, pa.Table | pa.RecordBatch)

    @cached_property
    def _rows(self) -> Columns:
        return from_arrow(self.table)

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def take(self, indices: Any) -> Columns:
        return self._rows.take(indices)

    def column(self, name: str) -> Any:
        """All of it."""
        return self._rows.columns[name]

    def column_names(self) -> list[str]:
        return list(self.table.schema.names)

    def fingerprint(self) -> str:
        digest = blake2b(f"{self.table.schema.remove_metadata()} {len(self)}".encode(), digest_size=16)
        step = max(1, len(self) // _SAMPLE)
        digest.update(repr(self.table.take(np.arange(0, len(self), step)).to_pydict()).encode())
        return digest.hexdigest()

    def describe(self) -> dict[str, Any]:
        columns = {field.name: str(field.type) for field in self.table.schema}
        return {"kind": "arrow", "num_rows": len(self), "columns": columns}

    def __getstate__(self) -> dict[str, Any]:
        return {"table": self.table}


def _table_of(batch: Any) -> Any:
    import pyarrow as pa

    return pa.Table.from_batches([batch])
