"""Which files are the user's own, and which were installed."""

import os
import site
import sysconfig
from functools import cache
from pathlib import Path

_INSTALLED = {"site-packages", "dist-packages"}


def is_installed(file: str) -> bool:
    """Python's own, this library's, or a package's: also of another environment that the path leads to."""
    return file.startswith(_library_dirs()) or not _INSTALLED.isdisjoint(Path(file).parts)


@cache
def _library_dirs() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    dirs = {paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    dirs |= {*site.getsitepackages(), site.getusersitepackages(), str(Path(__file__).parents[1])}
    return tuple({os.path.join(path, "") for one in dirs for path in (one, os.path.realpath(one))})
