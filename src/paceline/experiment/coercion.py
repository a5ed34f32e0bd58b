"""Values of YAML as what an annotation asks for: lists as tuples, names as enums, text as paths …"""

import inspect
import types
import typing
from collections.abc import Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any, Literal

import torch

from paceline.experiment.plan import Build
from paceline.experiment.signatures import EMPTY


class Mismatch(Exception):
    """The value is not what was expected. Its text is what was."""


def coerce(value: Any, annotation: Any) -> Any:
    """The value as the annotation wants it. Mismatch if it cannot be that. What an annotation says that is not known
    here, such as a type variable or a callable, is not checked."""
    if annotation is EMPTY or annotation is Any or annotation is object:
        return value
    if annotation is None or annotation is type(None):
        return _expect(value, value is None, "null")
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return coerce(value, typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return _one_of(value, typing.get_args(annotation))
    if origin is Literal:
        return _literal(value, typing.get_args(annotation))
    if isinstance(origin or annotation, type):
        return _of_class(value, origin or annotation, typing.get_args(annotation))
    return value


def implied(default: Any) -> Any:
    """What a parameter without an annotation expects, by its default: a number of a number. All may be null."""
    if isinstance(default, bool):
        return bool | None
    if isinstance(default, int | float) and not isinstance(default, Enum):
        return int | float | None
    if isinstance(default, str | Enum | PurePath | tuple | torch.dtype | torch.device):
        return typing.Optional[type(default)]  # noqa: UP045 - of a value, not of a type that is written down
    return EMPTY


def _expect(value: Any, is_right: bool, expected: str) -> Any:
    if not is_right:
        raise Mismatch(expected)
    return value


def _one_of(value: Any, arms: tuple[Any, ...]) -> Any:
    # What is exactly of a kind comes first: of `int | float`, 1 is an int, and of `str | Path`, text is text.
    arms = tuple(sorted(arms, key=lambda arm: arm is not type(value)))
    expected = []
    for arm in arms:
        try:
            return coerce(value, arm)
        except Mismatch as mismatch:
            expected.append(str(mismatch))
    raise Mismatch(" or ".join(dict.fromkeys(expected)))


def _literal(value: Any, choices: tuple[Any, ...]) -> Any:
    for choice in choices:
        if (type(choice) is type(value) and choice == value) or (isinstance(choice, Enum) and choice.name == value):
            return choice
    raise Mismatch("one of " + ", ".join(repr(choice) for choice in choices))


def _of_class(value: Any, cls: type, args: tuple[Any, ...]) -> Any:
    if isinstance(value, Build):
        is_protocol = getattr(cls, "_is_protocol", False) or cls.__module__ in ("collections.abc", "typing")
        return _expect(value, cls in value.target.__mro__ or is_protocol, _article(cls))
    for handles, convert in _KINDS:
        if handles(cls):
            return convert(value, cls, args)
    if inspect.isabstract(cls) or getattr(cls, "_is_protocol", False) or cls.__module__ == "collections.abc":
        return value  # Iterable, Callable …: a plain value may be one
    raise Mismatch(_article(cls) + ", with _target_")


def _article(cls: type) -> str:
    return f"{'an' if cls.__name__[0] in 'AEIOUaeiou' else 'a'} {cls.__name__}"


def _boolean(value: Any, cls: type, args: Any) -> Any:
    return _expect(value, isinstance(value, bool), "true or false")


def _number(value: Any, cls: type, args: Any) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if cls is int:
        return _expect(value, is_number and isinstance(value, int), "a whole number")
    try:
        return float(_expect(value, is_number, "a number"))
    except OverflowError:
        raise Mismatch("a number that fits a float") from None


def _text(value: Any, cls: type, args: Any) -> Any:
    return _expect(value, isinstance(value, str), "text")


def _enum(value: Any, cls: Any, args: Any) -> Any:
    found = [one for one in cls if value in (one.name, one.value) and not isinstance(value, bool)]
    if not found:
        raise Mismatch("one of " + ", ".join(one.name for one in cls))
    return next((one for one in found if one.name == value), found[0])


def _path(value: Any, cls: type, args: Any) -> Any:
    return cls(_expect(value, isinstance(value, str), "a path"))


def _tuple(value: Any, cls: type, args: tuple[Any, ...]) -> Any:
    _expect(value, isinstance(value, list | tuple), "a list")
    if not args:
        return tuple(value)
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(_items(value, args[0]))
    args = () if args == ((),) else args
    _expect(value, len(value) == len(args), f"a list of {len(args)}")
    return tuple(coerce(item, kind) for item, kind in zip(value, args, strict=True))


def _sequence(value: Any, cls: type, args: tuple[Any, ...]) -> Any:
    _expect(value, isinstance(value, list | tuple), "a list")
    items = _items(value, args[0]) if args else list(value)
    try:
        return cls(items) if cls in (set, frozenset) else items
    except TypeError:  # a list or a mapping, which no set can have
        raise Mismatch("a list of plain values") from None


def _items(value: Any, kind: Any) -> list[Any]:
    try:
        return [coerce(item, kind) for item in value]
    except Mismatch as mismatch:
        raise Mismatch(f"a list, each item {mismatch}") from None


def _mapping(value: Any, cls: type, args: tuple[Any, ...]) -> Any:
    _expect(value, isinstance(value, dict), "a mapping")
    return {key: coerce(item, args[1]) for key, item in value.items()} if len(args) == 2 else value


def _dtype(value: Any, cls: type, args: Any) -> Any:
    if isinstance(value, torch.dtype):
        return value
    found = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else None
    return _expect(found, isinstance(found, torch.dtype), "a dtype such as float32")


def _device(value: Any, cls: type, args: Any) -> Any:
    try:
        return torch.device(value) if isinstance(value, str | torch.device) else _expect(value, False, "")
    except (RuntimeError, ValueError, OverflowError, Mismatch):
        raise Mismatch("a device such as cpu or cuda:0") from None


_SEQUENCES = (list, set, frozenset)
_KINDS: tuple[tuple[Any, Any], ...] = (
    (lambda cls: cls is bool, _boolean),
    (lambda cls: issubclass(cls, Enum), _enum),
    (lambda cls: cls in (int, float), _number),
    (lambda cls: cls is str, _text),
    (lambda cls: issubclass(cls, PurePath), _path),
    (lambda cls: cls is tuple, _tuple),
    (lambda cls: cls in _SEQUENCES or cls.__name__ == "Sequence", _sequence),
    (lambda cls: cls is dict or cls is Mapping or cls.__name__ in ("Mapping", "MutableMapping"), _mapping),
    (lambda cls: cls is torch.dtype, _dtype),
    (lambda cls: cls is torch.device, _device),
)
