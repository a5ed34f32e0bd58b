"""A folder with an experiment that trains as it is, or with a data job that runs as it is, made of the files in
`template` and `data_template`."""

from __future__ import annotations

import re
from contextlib import suppress
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from paceline.errors import ConfigError

_SUFFIX = ".txt"
"""Of every file of the template: so that nobody takes it for a part of this package."""


def make_project(path: Path, kind: str = "template") -> Path:
    """Write the template into a new folder, or an empty one; its name is that of the runs. Gives the folder."""
    name, written = path.name, list[Path]()
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
        raise ConfigError(f"{name!r} cannot be the name of such a folder; expected letters, digits, '_', '.' and '-'.")
    try:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ConfigError(f"{path} is there already, and not an empty folder: choose another name.")
        for place, text in template(kind).items():
            target = path / place
            target.parent.mkdir(parents=True, exist_ok=True)
            written.append(target)
            target.write_text(_named(text, name), "utf-8")
    except OSError as error:
        _undo(path, written)
        raise ConfigError(f"{path} cannot be written: {error}") from None
    return path.absolute()


def _undo(path: Path, written: list[Path]) -> None:
    """So that it can be made when there is room: a folder with the half of it would be in the way."""
    for file in written:
        with suppress(OSError):
            file.unlink()
    folders = {parent for file in written for parent in file.parents if parent.is_relative_to(path)}
    for folder in sorted(folders, reverse=True):  # what somebody else has put there stays
        with suppress(OSError):
            folder.rmdir()


def template(kind: str = "template") -> dict[str, str]:
    """Its files, by their paths in the project."""
    return dict(_files(files(__package__) / kind, ""))


def _files(folder: Traversable, prefix: str) -> list[tuple[str, str]]:
    found = []
    for one in sorted(folder.iterdir(), key=lambda one: one.name):
        if one.is_dir():
            found += _files(one, f"{prefix}{one.name}/")
        elif one.name.endswith(_SUFFIX):
            found.append((prefix + one.name.removesuffix(_SUFFIX), one.read_text("utf-8")))
    return found


def _named(text: str, name: str) -> str:
    for former in ("example-experiment", "example-data"):
        text = text.replace(f'name = "{former}"', f'name = "{name}"')
    return text.replace("\n  name: experiment\n", f"\n  name: {name}\n")
