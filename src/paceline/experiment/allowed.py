"""Which classes a configuration may name. Whatever is not allowed is not even imported."""

import functools
import inspect
import sys
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.experiment.own_code import root_of
from paceline.experiment.schema import Node, Schema, walk
from paceline.experiment.signatures import path_of
from paceline.project_file import project_settings

_NO_BASES = frozenset(
    {
        "abc",
        "builtins",
        "collections",
        "collections.abc",
        "enum",
        "inspect",
        "numbers",
        "os",
        "pathlib",
        "types",
        "typing",
    }
)
"""Modules whose classes stand for values or for anything: to be derived from one of them is no recommendation."""


@dataclass(frozen=True)
class Allowed:
    """Default-deny: the classes that the typed experiment leads to, by annotation or by a recorded default; those that
    derive from them and are the project's own, or stand in the same package as the class that they derive from; and
    what the project allows by name. Never a function.

    To derive from one of them is not enough: `nn.Module` in an annotation would admit whatever any package that happens
    to be imported has made of it."""

    bases: frozenset[type]
    names: tuple[str, ...] = ()
    """"package.module.Class", or "package.*"."""
    roots: frozenset[Path] = frozenset()
    """The folders from which the project's own modules are imported."""

    def find(self, path: str) -> type | str:
        """The class of that name, or why it is not to be called. Imports nothing but what the project has named."""
        known = {path_of(cls): cls for cls in self.bases}
        if path in known:
            return known[path]
        is_named = self._is_named(path)
        found = _lookup(path, may_import=is_named)
        if found is None and not is_named:
            return (
                f"{path!r} is not known: import it where the experiment is defined, or allow it in pyproject.toml: "
                f'[tool.paceline] allow = ["{path}"]'
            )
        if found is None:
            return f"{path!r} is allowed, but there is no such class"
        if not inspect.isclass(found):
            return f"{path!r} is a {type(found).__name__}; only classes are ever called"
        if path in self.names or self._is_led_to(found):
            return found
        if is_named and self._is_named(f"{found.__module__}.{found.__qualname__}"):
            return found
        if is_named:
            return (
                f"{path!r} is {found.__module__}.{found.__qualname__}, which comes from elsewhere: a name with a * "
                f'allows what is defined there. If it is meant, allow it by its own name: allow = ["{path}"]'
            )
        return (
            f"{path!r} may not be called: the experiment does not lead to it, nor is it a class of this project, or of "
            "the same package, that derives from one that it leads to. If it is meant, allow it in pyproject.toml: "
            f'[tool.paceline] allow = ["{path}"]'
        )

    def _is_led_to(self, found: type) -> bool:
        above = [base for base in self.bases if base in found.__mro__]
        if found in above:
            return True
        return any(_is_inside(found, base) for base in above) or (bool(above) and self._is_own(found))

    def _is_own(self, found: type) -> bool:
        """Whether it comes from the folder from which the experiment does."""
        root = root_of(found.__module__)
        return found.__module__ == "__main__" or (root is not None and root in self.roots)

    def _is_named(self, path: str) -> bool:
        """Whether the project allows it."""
        return any(path == name or (name.endswith(".*") and path.startswith(name[:-1])) for name in self.names)


def allowed_by(schema: Schema, names: Iterable[str] = ()) -> Allowed:
    found: set[type] = set()
    for section in schema.sections:
        found |= {section.node.target, *_classes(section.node)}
    own = {schema.experiment, *(section.node.target for section in schema.sections)}
    roots = {root for cls in own if (root := root_of(cls.__module__)) is not None}
    bases = frozenset(cls for cls in found if "<locals>" not in cls.__qualname__)
    return Allowed(bases, tuple(names), frozenset(roots))


def _is_inside(cls: type, base: type) -> bool:
    """Whether it stands in the package that the base stands in."""
    package = base.__module__.rpartition(".")[0] or base.__module__
    return f"{cls.__module__}.".startswith(f"{package}.")


def allowed_names(project: Path) -> tuple[str, ...]:
    """`allow` of [tool.paceline] in the project's pyproject.toml; empty if there is none."""
    names = project_settings(project).get("allow", [])
    if not isinstance(names, list) or not all(isinstance(name, str) and name.strip(".* ") for name in names):
        raise ConfigError(
            f"{project / 'pyproject.toml'}: [tool.paceline] allow is {names!r}; expected a list of names such as "
            '"package.module.Class" or "package.*".'
        )
    return tuple(names)


def _classes(node: Node) -> Iterator[type]:
    for _, field in walk(node):
        yield from _annotated(field.annotation)
        yield from _targets(field.value)
    yield from _targets(node.args)


def _targets(value: Any) -> Iterator[type]:
    if isinstance(value, Node):
        yield value.target
        yield from _classes(value)
    elif isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _targets(item)


def _annotated(annotation: Any) -> Iterator[type]:
    for arg in typing.get_args(annotation):
        yield from _annotated(arg)
    cls = typing.get_origin(annotation) or annotation
    if isinstance(cls, type) and cls.__module__ not in _NO_BASES and not getattr(cls, "_is_protocol", False):
        yield cls


def _lookup(path: str, may_import: bool) -> Any:
    """What a dotted name stands for among the modules that are loaded. Attributes are looked up, not asked for: that
    could run code."""
    parts = path.split(".")
    for length in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:length])
        if may_import and name not in sys.modules:
            try:
                import_module(name)
            except (ImportError, ValueError):  # ValueError: it is the name of no module
                continue
        module = sys.modules.get(name)
        if module is not None:
            return functools.reduce(_attribute, parts[length:], module)
    return None


def _attribute(owner: Any, name: str) -> Any:
    return None if owner is None else vars(owner).get(name) if hasattr(owner, "__dict__") else None
