"""A project's pyproject.toml, and what of it is ours. Nothing heavy is imported for it."""

import re
import tomllib
import unicodedata
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.regular_files import read_regular

NAME_EXPECTED = (
    "expected the name of a folder: one line of text, up to 255 bytes, without a slash, with no dot in front, and not "
    "run_ with a number, as runs themselves are called."
)
_MOST_BYTES = 2**20
_MOST_NAME_BYTES = 255
_NO_TEXT = {"Cc", "Cs", "Zl", "Zp"}
"""Control characters, halves of characters, and what begins another line or paragraph, by Unicode."""
_RUN = re.compile(r"run_\d{3,}")


def read_project_file(project: Path) -> dict[str, Any] | None:
    """All of it; None if there is none. ConfigError for what cannot be read: a pipe in its place is not waited for."""
    path = project / "pyproject.toml"
    try:
        return tomllib.loads(read_regular(path, _MOST_BYTES, root="/").decode())
    except FileNotFoundError:
        return None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None


def project_settings(project: Path) -> dict[str, Any]:
    """[tool.paceline]; empty if there is none."""
    return table_in(read_project_file(project) or {}, project, "tool", "paceline")


def project_name(project: Path) -> str:
    """What its runs are called where nothing else is said: project.name, else as the folder. ConfigError if no folder
    of runs can be called so."""
    name = table_in(read_project_file(project) or {}, project, "project").get("name", project.name)
    if not isinstance(name, str) or not can_name_runs(name):
        raise ConfigError(f"{project / 'pyproject.toml'}: project.name is {name!r}; {NAME_EXPECTED}")
    return name


def can_name_runs(name: str) -> bool:
    """Hidden folders among the results are ours, as the trash is; what is called run_001 is taken for a run, and those
    in it would not be found; and a name is a line of what `xp ls -q` lists."""
    if not name or name.startswith(".") or "/" in name or _RUN.fullmatch(name):
        return False
    if any(unicodedata.category(one) in _NO_TEXT for one in name):
        return False
    return len(name.encode()) <= _MOST_NAME_BYTES


def table_in(told: dict[str, Any], project: Path, *names: str) -> dict[str, Any]:
    """A table of the file; empty if there is none. ConfigError if it is something else."""
    found: Any = told
    for name in names:
        found = found.get(name, {})
        if not isinstance(found, dict):
            raise ConfigError(
                f"{project / 'pyproject.toml'}: {name} is {found!r}; expected a table, [{'.'.join(names)}]."
            )
    return dict(found)
