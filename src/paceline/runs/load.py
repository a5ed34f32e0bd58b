"""Runs at rest: finding run folders and reading them, while they are written and after a kill at any moment.

Reading executes nothing that the folder contains, follows no link out of it, and opens no other place that it names
unless this user's account has written that down, or the reader says so.
"""

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import ArgumentError, CheckpointError, RunDamagedError, RunNotFoundError
from paceline.regular_files import is_inside
from paceline.runs.durable import read_file, read_json, read_json_lines
from paceline.runs.logdir import results_dir, run_number
from paceline.runs.status import RunState, RunStatus, find_driver, judge

if TYPE_CHECKING:
    import pandas as pd

    from paceline.checkpoints import CheckpointInfo

MAX_SEARCH_DEPTH = 8


def load_run(
    path: str | os.PathLike[str],
    *,
    checkpoint_root: str | os.PathLike[str] | None = None,
    clock: Callable[[], float] = time.time,
) -> "Run":
    """The run in a run folder, or the newest run in a Trainer's logdir.

    As for a Trainer's logdir, a relative path that is not in the working directory is looked for below the
    results folder. RunNotFoundError says what was found instead.

    `checkpoint_root` is where its checkpoints are, a path or a URL. It has to be given only for a run that keeps them
    outside of its folder and was not written by this user's account: what such a folder names is not opened by itself.
    """
    return Run(_find(path), clock, None if checkpoint_root is None else os.fspath(checkpoint_root))


def _find(path: str | os.PathLike[str]) -> Path:
    asked = Path(os.path.expanduser(path))
    there = next((p for p in (asked, results_dir() / asked) if os.path.exists(p)), asked).absolute()
    if _is_run_dir(there):
        return there
    newest = max(_run_dirs(there), key=lambda run_dir: run_number(run_dir.name) or 0, default=None)
    if newest is None:
        raise RunNotFoundError(f"There is no run at {path}: {_what_is_there(there)}")
    return newest


def list_runs(path: str | os.PathLike[str] | None = None, *, clock: Callable[[], float] = time.time) -> "list[Run]":
    """Every run in or below a folder (None: the results folder), newest first, damaged ones too."""
    root = results_dir() if path is None else Path(os.path.expanduser(path)).absolute()
    runs = [Run(run_dir, clock) for run_dir in _find_run_dirs(root, MAX_SEARCH_DEPTH)]
    return sorted(runs, key=lambda run: (run.status.created or 0.0, run.path.name), reverse=True)


@dataclass(frozen=True, repr=False)
class Run:
    """A run folder, read when asked: a property of a run that is still going shows its present state."""

    path: Path
    clock: Callable[[], float] = field(default=time.time, compare=False)
    _named_root: str | None = field(default=None, compare=False)
    _lines: dict[str, tuple[Any, list[dict[str, Any]]]] = field(default_factory=dict, compare=False)

    @property
    def name(self) -> str:
        return f"{self.path.parent.name}/{self.path.name}"

    @functools.cached_property
    def request(self) -> dict[str, Any]:
        """run.json: what was asked. Empty if the driver was killed before it was written.

        This one, and all that is read below, raises RunDamagedError for a file that is there and cannot be read: a
        pipe in its place, say, or a link that leads out of the folder."""
        return read_json(self.path / "run.json") or {}

    @property
    def config(self) -> dict[str, Any]:
        config = self.request.get("config")
        return config if isinstance(config, dict) else {}

    @property
    def environment(self) -> dict[str, Any]:
        return read_json(self.path / "environment.json") or {}

    @property
    def status(self) -> RunStatus:
        """With the reader's judgement: a run that nobody drives any more is LOST. Whatever is in the folder, there is
        one: who lists runs must not fail for the one that is damaged."""
        try:
            recorded = RunStatus.from_fields(read_json(self.path / "status.json") or {})
        except RunDamagedError as error:
            return RunStatus(RunState.LOST, reason=str(error), created=_modified(self.path))
        if recorded is None:  # killed between making the folder and the first status
            made = _modified(self.path)
            recorded = RunStatus(RunState.PENDING, heartbeat=made, created=made)
        return judge(recorded, now=self.clock(), driver=find_driver(recorded))

    @property
    def is_alive(self) -> bool:
        return not self.status.state.is_final

    @property
    def metrics(self) -> "pd.DataFrame":
        """One row for each step and rank; of a step that was done again after a restart, the last time."""
        from paceline.runs.pandas_frame import metrics_frame

        return metrics_frame(self._read_lines("metrics.jsonl"))

    @property
    def all_metrics(self) -> "pd.DataFrame":
        """Like `metrics`, with the steps that a restart made again."""
        from paceline.runs.pandas_frame import metrics_frame

        return metrics_frame(self._read_lines("metrics.jsonl"), with_superseded=True)

    @property
    def folds(self) -> "pd.DataFrame":
        """Of a cross-validation that has reported `cv`, the number of the fold: a row for each fold, with the last
        value of each number that it has reported (the mean over the ranks), and then the rows "mean" and "std"."""
        from paceline.runs.pandas_frame import folds_frame

        return folds_frame(self.metrics, self.name)

    @property
    def events(self) -> list[dict[str, Any]]:
        return list(self._read_lines("events.jsonl"))

    @property
    def seed(self) -> int | None:
        """What `enable_reproducibility` was last called with, else `config["seed"]`."""
        seeds = [event.get("seed") for event in self.events if event.get("kind") == "seed"]
        seed = seeds[-1] if seeds else self.config.get("seed")
        return seed if isinstance(seed, int) else None

    def log(self, rank: int = 0) -> str:
        """What a rank printed, so far."""
        text = read_file(self.path / "logs" / f"rank_{int(rank)}.log", root=self.path)
        if text is None:
            have = sorted(path.stem for path in self.path.glob("logs/rank_*.log"))
            raise ArgumentError(f"{self.name} has no log of rank {rank}. It has: {have or 'none'}.")
        return text.decode(errors="replace")

    @property
    def checkpoint_root(self) -> str:
        """Where its checkpoints are: a path, or a URL. As the reader has named it, else as the folder says."""
        if self._named_root is not None:
            return self._named_root
        strategy, root = self.request.get("checkpoint_strategy"), self.request.get("checkpoint_root")
        is_elsewhere = isinstance(strategy, dict) and strategy.get("storage_path") is not None
        # not what run.json says of the folder's own: that was its path before somebody moved or copied the run
        return root if is_elsewhere and isinstance(root, str) and root else str(self._own_root)

    @property
    def _own_root(self) -> Path:
        return self.path / "checkpoints"

    @property
    def checkpoints(self) -> "list[CheckpointInfo]":
        """Those that are still kept, oldest first. CheckpointError if they are in another place, which was written down
        neither by the reader nor by this user's account: see `load_run`."""
        from paceline.checkpoints import CheckpointStore
        from paceline.runs.kept_call import is_sealed

        root = self.checkpoint_root
        own = str(self._own_root)
        is_own = self._named_root is None and root == own and is_inside(own, self.path)
        is_known = self._named_root is not None or is_sealed(root, self.request.get("checkpoint_root_seal"))
        if not is_own and not is_known:
            raise CheckpointError(
                f"{self.path} keeps its checkpoints at {os.path.realpath(root) if root == own else root}, "
                "outside of the run folder, and nothing shows that this user's account has written that (it may be "
                "another's run, or of an earlier version). So nothing is opened there. If you know the place, name it: "
                "load_run(path, checkpoint_root=...)."
            )
        try:
            infos = CheckpointStore(root).list()
        except OSError as error:
            raise CheckpointError(f"The checkpoints at {root} cannot be listed: {error}") from error
        return [info for info in infos if not is_own or is_inside(info.path, own)]

    @property
    def latest_checkpoint_path(self) -> str | None:
        checkpoints = self.checkpoints
        return checkpoints[-1].path if checkpoints else None

    @property
    def best_checkpoint_path(self) -> str | None:
        """By the strategy that the run was given; without one the newest is the best."""
        from paceline.checkpoints import CheckpointStrategy, ranked

        fields = self.request.get("checkpoint_strategy")
        known = {f.name for f in dataclasses.fields(CheckpointStrategy)}
        given = {key: fields[key] for key in known & fields.keys()} if isinstance(fields, dict) else {}
        try:
            strategy = CheckpointStrategy(**given)
        except ArgumentError as error:
            raise RunDamagedError(f"The checkpoint strategy in {self.path}/run.json is none: {error}") from error
        best = ranked(self.checkpoints, strategy)
        return best[0].path if best else None

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, {self.status.state})"

    def __str__(self) -> str:
        return describe_run(self)

    def _repr_html_(self) -> str:
        """The same as a table, in a notebook."""
        from paceline.html_table import html_table

        return html_table(_rows(self))

    def _read_lines(self, name: str) -> list[dict[str, Any]]:
        """The file's objects, parsed anew only if it has grown."""
        path = self.path / name
        try:
            stat = path.stat()
        except OSError:
            return read_json_lines(path)  # there are none, or it says what is wrong
        version = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        known = self._lines.get(name)
        if known is None or known[0] != version:
            known = self._lines[name] = (version, read_json_lines(path))
        return known[1]


def describe_run(run: Run) -> str:
    """A few lines for a terminal: what it is, how it ended, how far it came."""
    rows = _rows(run)
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"{label:<{width}}  {value}" for label, value in rows)


def _rows(run: Run) -> list[tuple[str, str]]:
    status = run.status
    lines = run._read_lines("metrics.jsonl")
    rows = [("run", run.name), ("path", str(run.path)), ("state", status.state.value)]
    if status.reason:
        rows.append(("reason", status.reason))
    steps = [line["step"] for line in lines if isinstance(line.get("step"), int)]
    rows.append(("steps", str(max(steps, default=0))))
    if status.started is not None:
        end = status.ended if status.state.is_final else run.clock()
        rows.append(("duration", f"{(end or status.started) - status.started:.1f} s"))
    rows += [(f"last {key}", _short(value)) for key, value in _last_metrics(lines).items()]
    return rows


def _last_metrics(lines: list[dict[str, Any]]) -> Mapping[str, Any]:
    """Of the first rank that reported in the last step, without the columns that Paceline adds."""
    ranks = lines[-1].get("ranks") if lines else None
    ranks = ranks if isinstance(ranks, list) else []
    metrics: Mapping[str, Any] = next((m for m in ranks if isinstance(m, dict)), {})
    return {key: value for key, value in metrics.items() if not key.startswith("_")}


def _short(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _is_run_dir(path: Path) -> bool:
    """By name, or by content for a run folder that was renamed. Asked with os.path: it has an answer for any path."""
    is_run = run_number(path.name) is not None or any(os.path.isfile(path / f) for f in ("run.json", "status.json"))
    return is_run and os.path.isdir(path)


def _run_dirs(logdir: Path) -> list[Path]:
    return [path for path in _subdirs(logdir) if run_number(path.name) is not None]


def _find_run_dirs(path: Path, depth: int) -> list[Path]:
    if _is_run_dir(path):
        return [path]
    if depth == 0:
        return []
    return [run_dir for subdir in _subdirs(path) for run_dir in _find_run_dirs(subdir, depth - 1)]


def _subdirs(path: Path) -> list[Path]:
    """Without hidden ones and links, which may lead anywhere; none for what cannot be read."""
    try:
        with os.scandir(path) as entries:
            names = [e.name for e in entries if not e.name.startswith(".") and e.is_dir(follow_symlinks=False)]
    except (OSError, ValueError):  # ValueError: no folder can have this name
        return []
    return [path / name for name in sorted(names)]


def _what_is_there(path: Path) -> str:
    if not os.path.exists(path):
        parent = next(parent for parent in path.parents if os.path.exists(parent))
        return f"{path} does not exist. {_names(parent)}"
    if not path.is_dir():
        return f"{path} is a file. Give the run folder (run_001) or the Trainer's logdir that contains it."
    below = _find_run_dirs(path, MAX_SEARCH_DEPTH)
    if below:
        logdirs = sorted({str(run_dir.parent) for run_dir in below})
        some = ", ".join(logdirs[:3]) + (" …" if len(logdirs) > 3 else "")
        return f"{path} is no Trainer's logdir, but has {len(below)} runs below it: give one of {some}."
    return f"{path} has no run_001 in it. {_names(path)}"


def _names(directory: Path) -> str:
    try:
        names = sorted(os.listdir(directory))
    except OSError as error:
        return f"{directory} cannot be read ({error.strerror})."
    some = ", ".join(names[:5]) + (" …" if len(names) > 5 else "")
    return f"{directory} contains {some}." if names else f"{directory} is empty."


def _modified(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None
