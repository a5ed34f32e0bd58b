"""The frameworks that Paceline knows: all it knows of one is in the module that the registry names.

Nobody else asks "is it torch?". Of a value, `of` finds the framework by its class alone: that neither imports anything
nor looks into a package that another thread is half-way through importing.
"""

import sys
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from paceline import registry
from paceline.frameworks.base import Framework

__all__ = [
    "Framework",
    "by_tag",
    "every",
    "interface_variables",
    "loaded",
    "may_be_forked",
    "of",
    "plain",
    "thread_variables",
]


@cache
def every() -> tuple[Framework, ...]:
    """One object for each; the frameworks themselves are not imported by it."""
    return tuple(registry.find("framework", name)() for name in registry.names("framework"))


def loaded() -> list[Framework]:
    """Those that this process has imported, or is importing."""
    return [framework for framework in every() if framework.name in sys.modules]


def of(value: object) -> Framework | None:
    """The framework that defines the value's class, or a class it derives from."""
    return _owners.get(type(value)) or _owner_of(type(value))


_owners: dict[type, Framework] = {}
"""The frameworks' own classes, as they are met. Never a user's, nor one that a framework has made of it at run time: it
would stay alive, with all that it refers to."""


def _owner_of(kind: type) -> Framework | None:
    packages = _by_package()
    for cls in kind.__mro__:
        owner = packages.get(str(getattr(cls, "__module__", "")).partition(".")[0])
        if owner is not None:
            if getattr(sys.modules.get(kind.__module__), kind.__name__, None) is kind and cls is kind:
                _owners[kind] = owner
            return owner
    return None


def plain(value: Any) -> Any:
    """A framework's value for those who do not have it; anything else as it is."""
    framework = of(value)
    return value if framework is None else framework.plain(value)


def by_tag(tag: str) -> Framework | None:
    """Whose values a checkpoint keeps under this tag."""
    return next((one for one in every() if tag == one.array_tag or tag in one.value_tags), None)


def may_be_forked(module: str) -> bool:
    """Whether a process may be forked that has imported this module of some package."""
    framework = _by_package().get(module.partition(".")[0])
    return framework is None or framework.may_be_forked


def thread_variables(num_threads: int) -> dict[str, str]:
    """For all frameworks, since a function may use any of them: defaults by which a worker uses that many cores."""
    return _merged(framework.thread_variables(num_threads) for framework in every())


def interface_variables(interface: str) -> dict[str, str]:
    """For all frameworks: defaults by which workers talk over this network interface."""
    return _merged(framework.interface_variables(interface) for framework in every())


def _merged(parts: Iterable[Mapping[str, str]]) -> dict[str, str]:
    return {name: value for part in parts for name, value in part.items()}


@cache
def _by_package() -> dict[str, Framework]:
    return {package: framework for framework in every() for package in framework.packages}
