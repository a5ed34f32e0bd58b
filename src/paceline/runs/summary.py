"""What a listing shows of a run besides its state: what was asked, how far it came, and its metrics as curves.

A metric is a number that ranks report; of each step, that of the first rank that has it. Of a step that was made again
after a restart, the last time counts.

Who only wants to see how runs go (`is_rough`) waits for no file of any size: of a large one, lines here and there and
its end tell the curve and the last values, while the least and the most are those of what was read.
"""

import itertools
import math
import os
import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from paceline.errors import RunDamagedError
from paceline.json_text import decode, encode, pruned
from paceline.runs.durable import read_file
from paceline.runs.index import Found, is_settled, mark_of
from paceline.runs.index_file import IndexFile
from paceline.runs.json_lines import read_lines, sample_lines

_MOST_REQUEST_BYTES = 16 << 20
_LARGE_BYTES = 16 << 20
_NUM_POINTS = 48
_MOST_METRICS = 500
_COUNTERS = ("step", "epoch", "batch", "iteration", "global_step", "cv", "num_", "time")


@dataclass(frozen=True)
class Curve:
    """One metric over the steps of a run. `points` are some of its values, evenly spread, the last among them."""

    last: float
    least: float
    most: float
    points: tuple[float, ...] = ()


@dataclass(frozen=True)
class Summary:
    num_steps: int = 0
    metrics: Mapping[str, Curve] = field(default_factory=dict)
    """Without those that Paceline adds, whose names begin with _."""
    config: Mapping[str, Any] = field(default_factory=dict)
    num_workers: int | None = None
    function: str | None = None
    score: str | None = None
    """The metric by which the run ranks its checkpoints, if it has named one."""

    @property
    def key_metric(self) -> str | None:
        """The one to show if there is room for one."""
        if self.score in self.metrics:
            return self.score
        wanted = [name for name in self.metrics if not is_counter(name)]
        losses = [name for name in wanted if "loss" in name.lower()]
        validated = [name for name in losses if "val" in name.lower()]
        return next(iter([*validated, *losses, *wanted]), None)


def is_counter(name: str) -> bool:
    """Whether a metric says where a run is, not how good."""
    return name.startswith(_COUNTERS)


Series = tuple[list[int], list[float]]
"""Steps, and the value at each."""


def summarize(runs: Sequence[Found], cache: IndexFile | None = None, is_rough: bool = False) -> list[Summary]:
    """Of each run, in order. Those that have ended are read once, and then kept in the index."""
    kept = cache.load_summaries(run.name for run in runs if run.state.is_final) if cache is not None else {}
    found, new = [], {}
    for run in runs:
        mark, is_lasting = _mark(run)
        known = kept.get(run.name)
        summary = _from_bytes(known[1]) if known is not None and known[0] == mark else None
        if summary is None:
            is_rough_here = is_rough and _is_large(run.path)
            summary = read_summary(run.path, is_rough_here)
            if is_lasting and not is_rough_here:
                new[run.name] = mark, encode(asdict(summary))
        found.append(summary)
    if new and cache is not None:
        cache.save_summaries(new)
    return found


def read_summary(path: str, is_rough: bool = False) -> Summary:
    """Whatever is in the folder: what cannot be read is left out."""
    request = _read_request(path)
    metrics = os.path.join(path, "metrics.jsonl")
    try:
        series = collect(sample_lines(metrics, _NUM_POINTS) if is_rough else read_lines(metrics))
        series = dict(itertools.islice(series.items(), _MOST_METRICS))
    except RunDamagedError:
        series = {}
    config, workers = request.get("config"), request.get("num_workers")
    function, strategy = request.get("function"), request.get("checkpoint_strategy")
    name = function.get("name") if isinstance(function, dict) else None
    score = strategy.get("checkpoint_score_attribute") if isinstance(strategy, dict) else None
    return Summary(
        num_steps=max((steps[-1] for steps, _ in series.values() if steps), default=0),
        metrics={name: _curve(values) for name, (_, values) in series.items() if values and not name.startswith("_")},
        config=config if isinstance(config, dict) else {},
        num_workers=workers if type(workers) is int else None,
        function=name if isinstance(name, str) else None,
        score=score if isinstance(score, str) else None,
    )


def read_series(path: str | os.PathLike[str], rank: int | None = None) -> dict[str, Series]:
    """Every metric of a run; with `rank`, as that rank reported it. RunDamagedError if metrics.jsonl is no file."""
    return collect(read_lines(os.path.join(path, "metrics.jsonl")), rank)


def collect(lines: Iterable[Mapping[str, Any]], rank: int | None = None) -> dict[str, Series]:
    series: dict[str, Series] = {}
    present = -1
    for line in lines:
        step, attempt, ranks = line.get("step"), line.get("attempt"), line.get("ranks")
        if type(step) is not int or type(attempt) is not int or not isinstance(ranks, list):
            continue
        if attempt > present:
            _cut(series, step)
            present = attempt
        elif attempt < present:
            continue  # a rank of a former attempt that was heard late
        for reported in ranks if rank is None else ranks[rank : rank + 1]:
            for name, value in reported.items() if isinstance(reported, dict) else ():
                if value is None or type(value) is float or type(value) is int:
                    steps, values = series.setdefault(name, ([], []))
                    if not steps or steps[-1] < step:
                        steps.append(step)
                        values.append(math.nan if value is None else value)  # so it is written
    return series


def _cut(series: Mapping[str, Series], first: int) -> None:
    """An attempt begins, and makes all steps from this one on anew."""
    for steps, values in series.values():
        place = bisect_left(steps, first)
        del steps[place:], values[place:]


def _is_large(path: str) -> bool:
    try:
        return os.lstat(os.path.join(path, "metrics.jsonl")).st_size > _LARGE_BYTES
    except (OSError, ValueError):
        return False


def spread(values: Sequence[float], num: int = _NUM_POINTS) -> tuple[float, ...]:
    """So many of them at the most, evenly spread, with the first and the last."""
    if len(values) <= num:
        return tuple(values)
    return tuple(values[round(place * (len(values) - 1) / (num - 1))] for place in range(num))


def _curve(values: Sequence[float]) -> Curve:
    known = [value for value in values if not math.isnan(value)] or [math.nan]
    return Curve(values[-1], min(known), max(known), spread(values))


def _read_request(path: str) -> dict[str, Any]:
    try:
        request = decode(read_file(os.path.join(path, "run.json"), _MOST_REQUEST_BYTES) or b"")
    except RunDamagedError:
        return {}
    if not isinstance(request, dict):
        return {}
    wanted = ("config", "num_workers", "function", "checkpoint_strategy")
    return {name: pruned(request[name]) for name in wanted if name in request}


def _mark(run: Found) -> tuple[str, bool]:
    """Of the files that a summary is made of; and whether it can be kept."""
    marks, is_lasting = [], run.state.is_final
    for name in ("run.json", "metrics.jsonl"):
        try:
            found = os.lstat(f"{run.path}/{name}")
        except (OSError, ValueError):
            marks.append("-")
            continue
        marks.append(str(mark_of(found)))
        is_lasting = is_lasting and is_settled(found, time.time())
    return " ".join(marks), is_lasting


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _from_bytes(content: bytes) -> Summary | None:
    fields = decode(content)
    try:
        metrics = {
            name: Curve(
                _number(one["last"]), _number(one["least"]), _number(one["most"]), tuple(map(_number, one["points"]))
            )
            for name, one in fields["metrics"].items()
        }
        return Summary(**{**fields, "metrics": metrics})
    except (TypeError, KeyError, ValueError, AttributeError):
        return None
