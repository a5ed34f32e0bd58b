"""Packages that only some callbacks need."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from paceline.errors import MissingDependencyError


def require(package: str, extra: str, needed_for: str) -> None:
    """Says early and without importing it (which can take seconds) that a package is missing."""
    if find_spec(package) is None:
        raise MissingDependencyError(package, extra, needed_for)


@contextmanager
def environment_defaults(**variables: str) -> Iterator[None]:
    """Sets variables for the length of a block, for packages that read them at import or construction.

    What the user has set stays as it is.
    """
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
