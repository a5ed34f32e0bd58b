"""The folder that a logger writes to."""

import os
from pathlib import Path

from paceline.errors import ArgumentError, ArgumentTypeError


def check_log_dir(explicit: str | os.PathLike[str] | None) -> Path | None:
    """What the user gave as `logdir`, as a path; None means the folder of the run."""
    if explicit is None:
        return None
    if not isinstance(explicit, str | os.PathLike):
        raise ArgumentTypeError(f"logdir must be a path, got {type(explicit).__qualname__}.")
    return Path(explicit).expanduser()


def make_log_dir(explicit: Path | None, run_dir: str) -> Path:
    """Creates the folder, with its parents: the explicit one if there is one."""
    path = explicit if explicit is not None else Path(run_dir)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ArgumentError(
            f"logdir {str(path)!r} cannot be a folder, because a file is in the way. "
            "Give another logdir, or move the file."
        ) from error
    return path
