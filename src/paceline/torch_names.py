"""Names that need torch: each is imported at its first use, so that a package of them can be imported without it."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from paceline.errors import MissingDependencyError


def find(package: str, homes: Mapping[str, str], name: str) -> Any:
    """For a package's `__getattr__`. `homes` says in which of its modules a name is; none of them may bear the name of
    a function, which it would hide once it is imported."""
    if name not in homes:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    try:
        module = import_module(f"{package}.{homes[name]}")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingDependencyError("torch", "torch", f"{package}.{name}") from error
    return getattr(module, name)
