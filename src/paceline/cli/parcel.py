"""A project as a zip file: what of a folder goes to a cluster, and whether that is little enough."""

import os
import subprocess
import zipfile
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from paceline.errors import ConfigError
from paceline.project_file import project_settings

MOST_BYTES = 100 << 20
"""Of a request to Ray's job server, which the file is."""

_MOST_UNPACKED_BYTES = 10 * MOST_BYTES
"""More is not even tried: code is never so much, and to compress a dataset takes long."""

_NEVER = ("__pycache__", "venv", "node_modules")
_NUM_TOLD = 5
_LONG_AGO = (1980, 1, 1, 0, 0, 0)


def pack(project: Path, target: Path, outside: Iterable[Path] = (), most_bytes: int = MOST_BYTES) -> list[str]:
    """Write the project's files to a zip file, and give their names. The same files make the same bytes, so that Ray
    knows them again. ConfigError if it is too much.

    Not in it: what git ignores, hidden files, environments, what `[tool.paceline] exclude` names in pyproject.toml, and
    the folders `outside`.
    """
    try:
        return _pack(project, target, files_to_send(project, excluded(project), outside), most_bytes)
    except OSError as error:
        raise ConfigError(f"{project} cannot be sent to a cluster: {error}") from error


def _pack(project: Path, target: Path, names: list[str], most_bytes: int) -> list[str]:
    sizes = {name: os.stat(project / name).st_size for name in names}
    if sum(sizes.values()) > _MOST_UNPACKED_BYTES:
        raise ConfigError(_too_much(project, sizes, sum(sizes.values()), most_bytes))
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names:
            about = zipfile.ZipInfo(name, _LONG_AGO)
            about.compress_type = zipfile.ZIP_DEFLATED
            about.external_attr = (0o755 if os.access(project / name, os.X_OK) else 0o644) << 16
            archive.writestr(about, (project / name).read_bytes())
    if target.stat().st_size >= most_bytes:
        raise ConfigError(_too_much(project, sizes, target.stat().st_size, most_bytes))
    return names


def files_to_send(project: Path, patterns: Sequence[str] = (), outside: Iterable[Path] = ()) -> list[str]:
    """Their paths below the project, in order."""
    away = [one.resolve().relative_to(project.resolve()) for one in outside if _is_below(one, project)]
    listed = _listed(project)
    return sorted(
        name
        for name in listed
        if not any(part.startswith(".") or part in _NEVER for part in name.split("/"))
        and not any(PurePosixPath(name).is_relative_to(one) for one in away)
        and not any(_matches(name, pattern) for pattern in patterns)
        and (project / name).is_file()
    )


def excluded(project: Path) -> list[str]:
    """What pyproject.toml says."""
    patterns = project_settings(project).get("exclude", [])
    if not isinstance(patterns, list) or not all(isinstance(one, str) for one in patterns):
        raise ConfigError(f"pyproject.toml: [tool.paceline] exclude is {patterns!r}; expected a list of patterns.")
    return patterns


def _matches(name: str, pattern: str) -> bool:
    """A pattern names files, or a folder with all that is in it."""
    pattern = pattern.rstrip("/")
    return fnmatchcase(name, pattern) or any(fnmatchcase(str(one), pattern) for one in PurePosixPath(name).parents)


def _is_below(path: Path, project: Path) -> bool:
    return path.resolve() != project.resolve() and path.resolve().is_relative_to(project.resolve())


def _listed(project: Path) -> list[str]:
    """What git says, else all. Of a repository inside, a submodule say, git names the folder alone: that one is asked
    for its own files."""
    names = _listed_by_git(project)
    if not names:
        return _walked(project)
    inner = [name.rstrip("/") for name in names if (project / name / ".git").exists()]
    found = [
        f"{folder}/{name}"
        for folder in inner
        if not (project / folder).is_symlink()
        for name in _listed(project / folder)
    ]
    return [*names, *found]


def _listed_by_git(project: Path) -> list[str]:
    """What it knows or would take; nothing where there is no git, or no repository."""
    words = ["git", "-C", str(project), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [os.fsdecode(name) for name in done.stdout.split(b"\0") if name]


def _walked(project: Path) -> list[str]:
    found = []
    for folder, inner, names in os.walk(project):
        inner[:] = [name for name in inner if not name.startswith(".") and name not in _NEVER]
        found += [(Path(folder) / name).relative_to(project).as_posix() for name in names]
    return found


def _too_much(project: Path, sizes: dict[str, int], num_bytes: int, most_bytes: int) -> str:
    largest = sorted(sizes, key=lambda name: sizes[name], reverse=True)[:_NUM_TOLD]
    told = "".join(f"\n  {sizes[name] / 1e6:10.1f} MB  {name}" for name in largest)
    return (
        f"{project} is too much to be sent to a cluster: {num_bytes / 1e6:.1f} MB, and Ray takes less than "
        f"{most_bytes / 1e6:.1f} MB. Its largest files:{told}\nLeave them out, in pyproject.toml: [tool.paceline] "
        f'exclude = ["{largest[0].split("/")[0]}"]. Data belongs into the storage that all machines see.'
    )
