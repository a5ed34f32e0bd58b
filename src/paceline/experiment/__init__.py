"""Typed experiments: write classes with typed arguments and defaults, and get the configuration for free.

Every name is imported at its first use: with most of them comes torch.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from paceline.errors import MissingDependencyError

if TYPE_CHECKING:
    from paceline.experiment.base import BaseModule
    from paceline.experiment.binding import bind, check, diff, fresh
    from paceline.experiment.building import build_experiment
    from paceline.experiment.config import DUMMY_PARAMS, TrainConfig
    from paceline.experiment.loading import load
    from paceline.experiment.overrides import expand
    from paceline.experiment.project import find_conf, load_experiment
    from paceline.experiment.run_folders import same_runs
    from paceline.experiment.running import run_experiment
    from paceline.experiment.schema import schema_of
    from paceline.prepare import get_device, prepare_model

_HOMES = {
    "BaseModule": "base",
    "DUMMY_PARAMS": "config",
    "TrainConfig": "config",
    "bind": "binding",
    "build_experiment": "building",
    "check": "binding",
    "diff": "binding",
    "expand": "overrides",
    "find_conf": "project",
    "fresh": "binding",
    "load": "loading",
    "load_experiment": "project",
    "run_experiment": "running",
    "same_runs": "run_folders",
    "schema_of": "schema",
}

__all__ = [
    "DUMMY_PARAMS",
    "BaseModule",
    "TrainConfig",
    "bind",
    "build_experiment",
    "check",
    "diff",
    "expand",
    "find_conf",
    "fresh",
    "get_device",
    "load",
    "load_experiment",
    "prepare_model",
    "run_experiment",
    "same_runs",
    "schema_of",
]


def check_installed() -> None:
    """MissingDependencyError, with the line that installs it, if something is missing that every experiment needs."""
    for package in ("torch", "torchmetrics", "ruamel"):
        if find_spec(package) is None:
            raise MissingDependencyError(package, "experiment", "A typed experiment")


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        check_installed()
    if name in ("get_device", "prepare_model"):
        from paceline import prepare

        return getattr(prepare, name)
    if name not in _HOMES:
        raise AttributeError(f"module 'paceline.experiment' has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
