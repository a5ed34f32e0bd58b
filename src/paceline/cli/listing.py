"""Runs as rows: what `xp ls`, `best` and `compare` know of each, what can be asked of it, and how it is shown."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.cli.asking import Store
from paceline.cli.drawing import STATE_COLOURS, Column, clean, number, span, spark, table
from paceline.errors import ArgumentError
from paceline.runs.index import Found
from paceline.runs.summary import Summary, summarize
from paceline.runs.tags import read_tags

COLUMNS = (
    Column("name"),
    Column("run", least=7),
    Column("state", least=9),
    Column("steps", is_right=True, least=4),
    Column("metric", rank=1),
    Column("curve", rank=3),
    Column("workers", rank=6, is_right=True),
    Column("age", rank=2, is_right=True),
    Column("took", rank=4, is_right=True),
    Column("tags", rank=5),
)
_SORTS = ("created", "name", "state", "steps", "workers", "age", "duration")


@dataclass(frozen=True)
class Row:
    found: Found
    summary: Summary
    tags: frozenset[str]
    now: float
    progress: float | None = None
    """Of a run that goes on, from 0 to 1, if it says so."""
    job: str | None = None
    """The job that it is, if all that is known of it comes from a cluster."""

    @property
    def logdir(self) -> str:
        return self.found.name.rpartition("/")[0]

    @property
    def run(self) -> str:
        return self.found.name.rpartition("/")[2]

    @property
    def duration_s(self) -> float | None:
        started, ended = self.found.started, self.found.ended
        if started is None:
            return None
        return max(0.0, (self.now if not self.found.state.is_final else ended or started) - started)

    @property
    def age_s(self) -> float | None:
        return None if self.found.created is None else max(0.0, self.now - self.found.created)

    def lookup(self, field: str) -> Any:
        """A field of a condition, or of a sort."""
        group, _, key = field.partition(".")
        if key and group in ("metrics", "min", "max"):
            curve = self.summary.metrics.get(key)
            return None if curve is None else {"metrics": curve.last, "min": curve.least, "max": curve.most}[group]
        if key and group == "config":
            return find_key(self.summary.config, key)
        plain = {
            "name": self.logdir or self.run,
            "run": self.run,
            "state": self.found.state.value,
            "steps": self.summary.num_steps,
            "workers": self.summary.num_workers,
            "age": self.age_s,
            "duration": self.duration_s,
            "tags": tuple(sorted(self.tags)),
            "created": self.found.created,
        }
        return plain.get(field)

    def as_json(self) -> dict[str, Any]:
        summary = self.summary
        return {
            "name": self.found.name,
            "path": self.found.path,
            "state": self.found.state.value,
            "created": self.found.created,
            "started": self.found.started,
            "ended": self.found.ended,
            "duration_s": self.duration_s,
            "num_steps": summary.num_steps,
            "progress": self.progress,
            "num_workers": summary.num_workers,
            "function": summary.function,
            "key_metric": summary.key_metric,
            "metrics": {
                name: {"last": one.last, "min": one.least, "max": one.most} for name, one in summary.metrics.items()
            },
            "config": summary.config,
            "tags": sorted(self.tags),
            "job": self.job,
        }


def find_key(config: Mapping[str, Any], key: str) -> Any:
    """`opt.lr` is a key of that name, or `lr` in `opt`."""
    if key in config:
        return config[key]
    first, _, rest = key.partition(".")
    inner = config.get(first)
    return find_key(inner, rest) if rest and isinstance(inner, Mapping) else None


def rows_of(runs: Sequence[Found], store: Store, is_rough: bool = False) -> list[Row]:
    """`is_rough` for who asks neither for the least nor the most of a metric: then no file is too large."""
    now = time.time()
    summaries = summarize(runs, store.cache, is_rough)
    return [
        Row(run, one, read_tags(run.path), now, None if run.state.is_final else run.run.status.progress)
        for run, one in zip(runs, summaries, strict=True)
    ]


def sorted_rows(rows: Sequence[Row], by: str) -> list[Row]:
    """`-field` is the other way round. Those without a value come last."""
    is_reversed, field = by.startswith("-"), by.lstrip("-")
    if field not in _SORTS and field.partition(".")[0] not in ("metrics", "config", "min", "max"):
        raise ArgumentError(f"--sort {by}: expected one of {', '.join(_SORTS)}, metrics.NAME or config.NAME.")
    have = [row for row in rows if _is_value(row.lookup(field))]
    have.sort(key=lambda row: _ordered(row.lookup(field)), reverse=is_reversed)
    return have + [row for row in rows if not _is_value(row.lookup(field))]


def _is_value(value: Any) -> bool:
    return value is not None and not (isinstance(value, float) and math.isnan(value))


def _ordered(value: Any) -> tuple[int, Any]:
    """Numbers before words."""
    is_number = isinstance(value, int | float)
    return (0, value) if is_number else (1, str(value))


def draw_rows(rows: Sequence[Row], most: int | None, is_on: bool, metric: str | None = None) -> list[str]:
    cells = [_cells(row, metric) for row in rows]
    return table(COLUMNS, cells, most, {2: STATE_COLOURS}, is_on)


def _cells(row: Row, metric: str | None) -> tuple[str, ...]:
    summary = row.summary
    key = metric or summary.key_metric
    curve = summary.metrics.get(key) if key else None
    return (
        clean(row.logdir or "."),
        clean(row.run),
        row.found.state.value,
        _steps(summary.num_steps, row.progress),
        f"{clean(key or '')} {number(curve.last)}" if curve else "",
        spark(curve.points) if curve and len(curve.points) > 1 else "",
        "" if summary.num_workers is None else str(summary.num_workers),
        span(row.age_s, is_rough=True),
        span(row.duration_s),
        " ".join(sorted(row.tags)),
    )


def _steps(num_steps: int, progress: float | None) -> str:
    done = "" if progress is None else f" {min(1.0, max(0.0, progress)):.0%}"
    return f"{num_steps or ''}{done}".strip()
