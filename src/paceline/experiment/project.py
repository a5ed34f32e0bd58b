"""A project: a folder with an experiment, its conf.yaml and its pyproject.toml."""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.experiment.allowed import allowed_names
from paceline.experiment.loading import load
from paceline.experiment.plan import Plan
from paceline.experiment.schema import schema_of
from paceline.regular_files import read_regular

DEFAULT_EXPERIMENT = "src.experiment:Experiment"
_MOST_BYTES = 256 * 1024
"""Of a configuration: many times as much as any has."""


def find_conf(project: Path) -> Path | None:
    """Its configuration: src/conf.yaml, else conf.yaml."""
    return next((path for path in (project / "src/conf.yaml", project / "conf.yaml") if path.is_file()), None)


def conf_to_write(project: Path) -> Path:
    """Where the configuration is, or belongs."""
    return find_conf(project) or (project / "src/conf.yaml" if (project / "src").is_dir() else project / "conf.yaml")


def load_experiment(project: Path, name: str | None = None) -> Any:
    """Import the experiment's class: "module:Class", by default that of pyproject.toml ([tool.paceline] experiment),
    else src.experiment:Experiment. The project's folder comes first on sys.path."""
    name = name or _named(project) or DEFAULT_EXPERIMENT
    module, _, attribute = name.partition(":")
    if str(project) not in sys.path:
        sys.path.insert(0, str(project))
    try:
        found = getattr(import_module(module), attribute or "Experiment", None)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise
        raise ConfigError(
            f"There is no module {module!r} in {project}. Go to the folder of an experiment, where src/experiment.py "
            'is, or say which one it is in pyproject.toml: [tool.paceline] experiment = "package.module:Class".'
        ) from None
    if not isinstance(found, type):
        raise ConfigError(f"{module} has no class {attribute or 'Experiment'!r}.")
    return found


def project_of(experiment: type) -> Path:
    """The folder from which the experiment's module is imported; of a program or a notebook, the working directory."""
    module = sys.modules.get(experiment.__module__)
    file = getattr(module, "__file__", None)
    if file is None or experiment.__module__ == "__main__":
        return Path(os.getcwd())
    return Path(file).resolve().parents[experiment.__module__.count(".")]


def load_plan(experiment: type, conf: str | os.PathLike[str] | None = None, overrides: Sequence[str] = ()) -> Plan:
    """The configuration of an experiment, checked. Without a path it is that of its project; if there is none, all is
    as in the code."""
    project = project_of(experiment)
    path = find_conf(project) if conf is None else Path(conf)
    try:
        text = "" if path is None else read_regular(path, _MOST_BYTES, "/").decode()  # wherever a link leads
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    name = "the configuration" if path is None else os.path.relpath(path)
    return load(schema_of(experiment), text, overrides, allowed_names(project), name)


def _named(project: Path) -> str | None:
    try:
        told = tomllib.loads((project / "pyproject.toml").read_text())
    except (FileNotFoundError, tomllib.TOMLDecodeError, UnicodeDecodeError):
        return None
    name = told.get("tool", {}).get("paceline", {}).get("experiment")
    return name if isinstance(name, str) else None
