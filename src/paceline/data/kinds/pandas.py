"""Data frames, which become Arrow tables."""

from __future__ import annotations

import sys
from typing import Any

from paceline.data.kinds.arrow import ArrowSource
from paceline.errors import ArgumentError


class PandasSource(ArrowSource):
    def __init__(self, frame: Any):
        import pyarrow as pa

        try:
            super().__init__(pa.Table.from_pandas(frame, preserve_index=False).replace_schema_metadata(None))
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise ArgumentError(
                f"dataset: a column of the data frame holds values of different kinds: {error}. Convert it first, for "
                "example with .astype(str)."
            ) from error
        except ValueError as error:  # two columns have one name
            raise ArgumentError(f"dataset: this data frame cannot be read: {error}.") from error

    @staticmethod
    def takes(value: Any) -> bool:
        pd = sys.modules.get("pandas")
        return pd is not None and isinstance(value, pd.DataFrame)

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "kind": "pandas"}
