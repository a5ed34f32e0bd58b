"""What a class can be called with: its parameters, with annotations resolved and defaults as objects."""

import dataclasses
import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.errors import ConfigError

EMPTY = inspect.Parameter.empty


@dataclass(frozen=True)
class Factory:
    """A default that is made for each object: `field(default_factory=...)` of a dataclass."""

    make: Callable[[], Any]


@dataclass(frozen=True)
class Parameter:
    name: str
    annotation: Any
    """EMPTY: none is written."""
    default: Any
    """EMPTY: it has to be given. It may be a Factory."""


@dataclass(frozen=True)
class Signature:
    parameters: tuple[Parameter, ...]
    takes_args: bool
    """Whether it has `*args`."""
    takes_kwargs: bool


def signature_of(cls: type) -> Signature | None:
    """None if Python does not know, as of many classes that are written in C."""
    try:
        found = inspect.signature(cls)
    except (TypeError, ValueError):
        return None
    hints = _hints(cls)
    factories = _factories(cls)
    named = [p for p in found.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.POSITIONAL_ONLY)]
    kinds = {p.kind for p in found.parameters.values()}
    return Signature(
        tuple(Parameter(p.name, hints.get(p.name, EMPTY), factories.get(p.name, p.default)) for p in named),
        takes_args=inspect.Parameter.VAR_POSITIONAL in kinds,
        takes_kwargs=inspect.Parameter.VAR_KEYWORD in kinds,
    )


def path_of(cls: type) -> str:
    """The dotted name by which a configuration calls it."""
    if "<locals>" in cls.__qualname__:
        raise ConfigError(
            f"{cls.__qualname__} is defined inside a function, where a configuration cannot find it. Define it in a "
            "module."
        )
    return f"{cls.__module__}.{cls.__qualname__}"


def constructor_of(cls: type) -> Any:
    """The function that is written down: `__init__`, or `__new__` of a class that makes others."""
    for name in ("__new__", "__init__"):  # in the order in which `inspect.signature` looks
        function = getattr(cls, name)
        if inspect.isfunction(inspect.unwrap(function)) and getattr(object, name) is not function:
            return inspect.unwrap(function)
    return None


def _hints(cls: type) -> dict[str, Any]:
    """Annotations that cannot be resolved, names that exist for type checkers only, count as none."""
    function = constructor_of(cls)
    if function is None:
        return {}
    try:
        if dataclasses.is_dataclass(cls) and "__init__" in vars(cls):
            return typing.get_type_hints(cls)
        return typing.get_type_hints(function)
    except Exception:
        given = getattr(function, "__annotations__", {})
        return {name: hint for name, hint in given.items() if not isinstance(hint, str)}


def _factories(cls: type) -> dict[str, Any]:
    if not dataclasses.is_dataclass(cls):
        return {}
    fields = dataclasses.fields(cls)
    return {one.name: Factory(one.default_factory) for one in fields if one.default_factory is not dataclasses.MISSING}
