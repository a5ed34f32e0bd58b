"""A project: a folder with an experiment, its conf.yaml and its pyproject.toml."""

from __future__ import annotations

import io
import os
import select
import stat
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.experiment.allowed import allowed_names
from paceline.experiment.loading import load_each
from paceline.experiment.plan import Plan
from paceline.experiment.schema import schema_of
from paceline.project_file import project_settings
from paceline.runs.durable import write_atomic

DEFAULT_EXPERIMENT = "src.experiment:Experiment"
MOST_CONF_BYTES = 2 * 2**20
PIPE_S = 10.0


def find_conf(project: Path) -> Path | None:
    """Its configuration: src/conf.yaml, else conf.yaml."""
    return next((path for path in (project / "src/conf.yaml", project / "conf.yaml") if path.exists()), None)


def conf_to_write(project: Path) -> Path:
    """Where the configuration is, or belongs."""
    return find_conf(project) or (project / "src/conf.yaml" if (project / "src").is_dir() else project / "conf.yaml")


def read_conf(path: Path, is_named: bool = False) -> str:
    """ConfigError if it is no text, or more than anybody would write. One that the user has named may be a pipe, as
    --conf <(...) is, from which something has to come within PIPE_S; any other is a file, or an error at once."""
    try:
        with open(path, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            is_file = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            if not is_file and not is_named:
                raise ConfigError(f"{path} is not a regular file: put the configuration there, or name it with --conf.")
            data = _read(file, MOST_CONF_BYTES + 1, None if is_file else PIPE_S)
        if len(data) > MOST_CONF_BYTES:
            raise ConfigError(f"{path} has more than {MOST_CONF_BYTES:,} bytes: no configuration is so long.")
        return data.decode().replace("\r\n", "\n")
    except TimeoutError:
        raise ConfigError(f"{path} is a pipe or a device, and nothing came from it in {PIPE_S:g} s.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None


def _read(file: io.FileIO, most_bytes: int, within_s: float | None) -> bytes:
    """Up to its end. TimeoutError if a writer keeps silent for longer."""
    found, waiting = bytearray(), select.poll()
    waiting.register(file, select.POLLIN)
    while len(found) < most_bytes:
        if within_s is not None and not waiting.poll(within_s * 1e3):
            raise TimeoutError
        data = file.read(most_bytes - len(found))
        if data == b"":
            break
        found += data or b""
    return bytes(found)


def write_conf(path: Path, text: str) -> None:
    """Whole or not at all. Of a link, what it leads to. Who might read and write it before, may do so afterwards."""
    place = os.path.realpath(path)
    try:
        mode = stat.S_IMODE(os.stat(place).st_mode) if os.path.exists(place) else None
        write_atomic(place, text.encode(), mode=mode)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from None


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
    return load_plans(experiment, conf, [overrides])[0]


def load_plans(
    experiment: type, conf: str | os.PathLike[str] | None, combinations: Iterable[Sequence[str]]
) -> list[Plan]:
    """The same with several sets of overrides. The file is read once: it may be a pipe, and all are of one text."""
    project = project_of(experiment)
    path = find_conf(project) if conf is None else Path(conf)
    text = "" if path is None else read_conf(path, is_named=conf is not None)
    name = "the configuration" if path is None else os.path.relpath(path)
    return load_each(schema_of(experiment), text, combinations, allowed_names(project), name)


def _named(project: Path) -> str | None:
    name = project_settings(project).get("experiment")
    if name is not None and not isinstance(name, str):
        raise ConfigError(
            f'{project / "pyproject.toml"}: [tool.paceline] experiment is {name!r}; expected "package.module:Class".'
        )
    return name
