"""Metrics as a pandas frame: one row for each step and rank."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from paceline.errors import DataError, MissingDependencyError

if TYPE_CHECKING:
    import pandas as pd

_OWN_COLUMNS = ("step", "rank", "attempt")


def metrics_frame(lines: Iterable[Mapping[str, Any]], *, with_superseded: bool = False) -> "pd.DataFrame":
    """Columns step, rank, attempt, then every metric in the order of its first report.

    A metric that is called like one of the three appears as `reported_step` and so on. After a restart from a
    checkpoint steps are done again: unless `with_superseded`, only the last time is kept.
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise MissingDependencyError("pandas", "data", "reading the metrics of a run as a frame") from error
    lines = [line for line in lines if _is_step(line)]
    if not with_superseded:
        lines = last_attempts(lines)
    rows = [row for line in lines for row in _rows(line)]
    columns = dict.fromkeys(_OWN_COLUMNS) | dict.fromkeys(key for row in rows for key in row)
    return pd.DataFrame(rows, columns=list(columns))


def folds_frame(metrics: "pd.DataFrame", name: str) -> "pd.DataFrame":
    """See Run.folds. Of each metric its own last step counts: the loss may be reported at each step, the accuracy at
    the fold's end."""
    import pandas as pd

    if "cv" not in metrics or not metrics["cv"].notna().any():
        raise DataError(
            f"{name}: no report says of which fold it is. Say it in the function: report(cv=index, loss=...), with the "
            "number of the fold, as in `for index, (train, val) in get_datasets().items()`."
        )
    names = [key for key in metrics if key not in (*_OWN_COLUMNS, "cv") and not key.startswith("_")]
    rows = {}
    for fold, reports in metrics[metrics["cv"].notna()].groupby("cv", sort=False):
        rows[_whole(fold)] = {key: _last_mean(reports[["step", key]]) for key in names}
    frame = pd.DataFrame.from_dict(rows, orient="index", columns=names, dtype=float).dropna(axis="columns", how="all")
    summed = frame.agg(["mean", "std"]) if len(frame.columns) else frame.reindex(["mean", "std"])
    return pd.concat([frame, summed]).rename_axis("cv")


def _last_mean(values: "pd.DataFrame") -> float | None:
    """Of the numbers in the last step that has any."""
    _, key = values.columns
    are_numbers = values[key].map(lambda value: isinstance(value, int | float) and not isinstance(value, bool))
    found = values[are_numbers & values[key].notna()]
    last = found[found["step"] == found["step"].max()]
    return float(last[key].astype(float).mean()) if len(last) else None


def _whole(fold: Any) -> Any:
    """A missing value in another report makes floats of whole numbers."""
    return int(fold) if isinstance(fold, float) and fold.is_integer() else fold


def last_attempts(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """One line a step, in the order of steps. An attempt does all steps from its first one on anew: those that an
    earlier one had made from there on do not count, also if there are fewer of them now. A rank that was late has a
    line of its own, which joins that of the others."""
    first: dict[int, int] = {}
    for line in lines:
        first[line["attempt"]] = min(line["step"], first.get(line["attempt"], line["step"]))
    bound, end_of = math.inf, {}
    for attempt in sorted(first, reverse=True):
        end_of[attempt] = bound
        bound = min(bound, first[attempt])
    last: dict[int, Mapping[str, Any]] = {}
    for line in lines:
        if line["step"] < end_of[line["attempt"]]:
            present = last.get(line["step"])
            last[line["step"]] = (
                line if present is None else {**line, "ranks": _merged(present["ranks"], line["ranks"])}
            )
    return [last[step] for step in sorted(last)]


def _merged(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    """What each rank has reported, the second time if there are two."""
    return [old if new is None else new for old, new in zip_longest(first, second)]


def _is_step(line: Mapping[str, Any]) -> bool:
    return (
        isinstance(line.get("step"), int)
        and isinstance(line.get("attempt"), int)
        and isinstance(line.get("ranks"), list)
    )


def _rows(line: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {"step": line["step"], "rank": rank, "attempt": line["attempt"]}
        | {f"reported_{key}" if key in _OWN_COLUMNS else key: value for key, value in metrics.items()}
        for rank, metrics in enumerate(line["ranks"])
        if isinstance(metrics, dict)
    ]
