"""A typed experiment as a tree of values: which sections it has, which classes they are made of, and with what.

It is read from signatures and from defaults (`recovery`), and nothing is made for it. A configuration is this tree as
YAML, and is checked against it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from paceline.errors import ConfigError
from paceline.experiment.config import TrainConfig
from paceline.experiment.recovery import Call, Kept, recover
from paceline.experiment.signatures import EMPTY, path_of, signature_of
from paceline.experiment.values import is_plain, plain

ROLES = ("cfg", "datasets", "models", "optimizers", "losses", "metrics", "tools")
"""The sections in the order in which they are written."""
MISSING = "???"
"""In a configuration: nobody has said what it is."""
_MOST_DEPTH = 40


@dataclass(frozen=True)
class Field:
    """One argument. Its value is plain, a Node, a container of these, Kept, or MISSING."""

    name: str
    annotation: Any
    value: Any
    how: str
    """Where the value was found: "source", "attributes", "signature" …"""
    is_late: bool = False
    """Whether it is given when the experiment is built, whatever the configuration says."""


@dataclass(frozen=True)
class Node:
    """A class, and what it is called with."""

    target: type
    fields: tuple[Field, ...]
    args: tuple[Any, ...] = ()
    """For `*args` of the class, which have no names: `_args_` in a configuration."""
    takes_args: bool = False
    takes_kwargs: bool = False

    def field(self, name: str) -> Field | None:
        return next((one for one in self.fields if one.name == name), None)


@dataclass(frozen=True)
class Section:
    role: str
    """The parameter of the experiment: "models"."""
    node: Node

    @property
    def key(self) -> str:
        """At the top of a configuration."""
        return path_of(self.node.target)


@dataclass(frozen=True)
class Schema:
    experiment: type
    sections: tuple[Section, ...]

    def unknown(self) -> list[str]:
        """What could not be recovered, as paths; without what a constructor asks for and no default gives."""
        return [
            f"{section.role}.{path}"
            for section in self.sections
            for path, field in walk(section.node)
            if field.how == "unknown"
        ]


def schema_of(experiment: type) -> Schema:
    """Of a class whose `__init__` takes sections, each annotated with a class of its own."""
    signature = signature_of(experiment)
    assert signature is not None
    for parameter in signature.parameters:
        if not isinstance(parameter.annotation, type):
            raise ConfigError(
                f"{experiment.__qualname__}.__init__ takes {parameter.name!r} without a class as its annotation; "
                f"expected one that tells what it is made of: `{parameter.name}: {parameter.name.title()}`."
            )
    given = {one.name: one.annotation for one in signature.parameters}
    config = given.get("cfg", TrainConfig)
    if not issubclass(config, TrainConfig):
        raise ConfigError(
            f"cfg is annotated with {path_of(config)}; expected paceline.experiment.TrainConfig, or a dataclass that "
            "is derived from it: its fields are needed to run the experiment."
        )
    roles = [*(role for role in ROLES if role in given), *(name for name in given if name not in ROLES)]
    return Schema(experiment, tuple(Section(role, node_of(given[role])) for role in roles))


def node_of(cls: type, call: Call | None = None, inside: tuple[type, ...] = ()) -> Node:
    """A class called as `call` says, else with its defaults."""
    call = call or Call(cls)
    signature = signature_of(cls)
    if signature is None:
        raise ConfigError(f"The parameters of {path_of(cls)} are not known to Python, so it cannot be configured.")
    if len(inside) > _MOST_DEPTH:
        raise ConfigError(f"{path_of(cls)} has defaults that are more than {_MOST_DEPTH} objects deep.")
    fields = []
    for parameter in signature.parameters:
        field = _field(cls, parameter, call, (*inside, cls))
        fields += [] if field is None else [field]
    named = {one.name for one in signature.parameters}
    for name, value in call.kwargs.items():  # of **kwargs
        if name not in named:
            fields.append(Field(name, EMPTY, _made(value, (*inside, cls)), call.how))
    args = tuple(_made(value, (*inside, cls)) for value in call.args)
    return Node(cls, tuple(fields), args, signature.takes_args, signature.takes_kwargs)


def walk(node: Node, path: str = "") -> Iterator[tuple[str, Field]]:
    """Every field of a tree, with its path."""
    for field in node.fields:
        here = f"{path}.{field.name}" if path else field.name
        yield here, field
        if isinstance(field.value, Node):
            yield from walk(field.value, here)


def as_plain(value: Any) -> Any:
    """A Node as the dict that stands for it in YAML. What is kept in the code is left out."""
    if isinstance(value, Node):
        args = {"_args_": [as_plain(one) for one in value.args]} if value.args else {}
        fields = {one.name: as_plain(one.value) for one in value.fields if not isinstance(one.value, Kept)}
        return {"_target_": path_of(value.target), **args, **fields}
    if isinstance(value, list | tuple):
        return [as_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: as_plain(item) for key, item in value.items()}
    return plain(value)


def _field(cls: type, parameter: Any, call: Call, inside: tuple[type, ...]) -> Field | None:
    """None for a default that a configuration cannot hold, and that is the class's own: it needs no word."""
    name = parameter.name
    if issubclass(cls, Optimizer) and name == "params":
        return Field(name, EMPTY, MISSING, "built", is_late=True)
    if name in call.kwargs:
        return Field(name, parameter.annotation, _made(call.kwargs[name], inside), call.how)
    if name in call.unknown:
        return Field(name, parameter.annotation, MISSING, "unknown")
    if parameter.default is EMPTY:
        return Field(name, parameter.annotation, MISSING, "signature")
    found = recover(cls, name, parameter.default)
    if isinstance(found, Kept) or not _is_expressible(found):
        return None
    how = found.how if isinstance(found, Call) else "signature"
    return Field(name, parameter.annotation, _made(found, inside), how)


def _made(value: Any, inside: tuple[type, ...]) -> Any:
    if isinstance(value, Call):
        if signature_of(value.target) is None:
            raise ConfigError(f"The parameters of {path_of(value.target)} are not known to Python.")
        return node_of(value.target, value, inside)
    if isinstance(value, list | tuple):
        return type(value)(_made(item, inside) for item in value)
    if isinstance(value, dict):
        return {key: _made(item, inside) for key, item in value.items()}
    return value


def _is_expressible(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_expressible, value))
    if isinstance(value, dict):
        return all(map(_is_expressible, value.values()))
    return isinstance(value, Call) or is_plain(value)
