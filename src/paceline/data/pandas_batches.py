"""Columns as pandas' frames, and back."""

from typing import Any

import numpy as np
import pandas as pd

from paceline.data.rows import Columns, from_arrow


def frame_of(rows: Columns) -> Any:
    values = {
        name: (column if column.ndim == 1 else list(column)) if isinstance(column, np.ndarray) else column.to_pandas()
        for name, column in rows.columns.items()
    }
    return pd.DataFrame(values)


def columns_of(frame: Any) -> Columns:
    import pyarrow as pa

    return from_arrow(pa.Table.from_pandas(frame, preserve_index=False))
