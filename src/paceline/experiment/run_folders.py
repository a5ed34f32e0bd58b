"""Where the runs of a configuration are, and which of them there were before."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, PacelineError, RunDamagedError
from paceline.experiment.building import make
from paceline.experiment.config import TrainConfig
from paceline.experiment.plan import Plan
from paceline.project_file import NAME_EXPECTED, can_name_runs
from paceline.runs import Run, list_runs
from paceline.runs.kept_call import is_own_call
from paceline.runs.logdir import results_dir


def same_runs(config_hash: str, root: str | os.PathLike[str] | None = None, code_hash: str | None = None) -> list[Run]:
    """Runs with that configuration (and, if given, that code) in or below a folder, newest first. Default: the results
    folder. Only files of the run folders are read."""
    found = [(run, _told(run)) for run in list_runs(root)]
    same = [(run, told) for run, told in found if told.get("config_hash") == config_hash]
    return [run for run, told in same if code_hash is None or told.get("code_hash") == code_hash]


def former_run(runs: Sequence[Run]) -> Run | None:
    """Which of several runs of one configuration, newest first, is the one to tell of, or to go on with: one that has
    succeeded, else one that goes on, else the newest that can be resumed, with a checkpoint if any has one. A folder
    that is only the beginning of a run, or was put there by somebody, does not hide a run behind it."""
    return min(runs, key=_rank, default=None)


def _rank(run: Run) -> int:
    status = run.status
    if status.state == "SUCCEEDED":
        return 0
    if not status.state.is_final and status.pid is not None:  # a driver says who it is before it asks for anything
        return 1
    if not is_own_call(run.path):
        return 4
    try:
        return 2 if run.checkpoints else 3
    except (PacelineError, OSError):
        return 3


def _told(run: Run) -> Mapping[str, Any]:
    try:
        return run.config
    except RunDamagedError:  # nobody knows what it was, and that must not keep anybody from training
        return {}


def logdir_of(plan: Plan) -> Path:
    """Where the runs of this configuration's name are."""
    name: str = config_of(plan).name
    if not can_name_runs(name):
        raise ConfigError(f"cfg.name is {name!r}; {NAME_EXPECTED}")
    return results_dir() / name


def config_of(plan: Plan) -> Any:
    """The plan's TrainConfig. ConfigError if it has numbers with which a loop would quietly do nothing, or not what was
    asked."""
    cfg = make(plan.sections["cfg"]) if "cfg" in plan.sections else TrainConfig()
    for name, least in (("num_epochs", 0), ("start_epoch", 0), ("prefetch_batches", 0), ("log_every", 1)):
        value = getattr(cfg, name)
        if isinstance(value, int) and value < least:  # a class of the user's own may have None there
            raise ConfigError(f"cfg.{name} is {value}: expected {least} or more.")
    return cfg
