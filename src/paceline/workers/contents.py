"""What a value consists of when it is pickled, named as its author knows it: which part does not travel, and which one
is large. For errors and warnings: it packs the parts one by one, which takes its time."""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FunctionType, MethodType
from typing import Any

from paceline.workers import parcel

_MAX_DEPTH = 20


def culprit(named: Mapping[str, Any]) -> tuple[str, Any]:
    """The innermost part of these values that cannot be packed, and the way to it."""
    found = _unpackable(list(named.items()))
    return _descend(found[1], found[0], _unpackable) if found is not None else ("something in it", None)


def _unpackable(parts: list[tuple[str, Any]]) -> tuple[str, Any] | None:
    return next((part for part in parts if _num_bytes(part[1]) is None), None)


def largest(value: Any, name: str) -> tuple[str, int]:
    """The innermost part that makes up more than half of it, and its size. `value` can be packed."""

    num_bytes = _num_bytes(value) or 0

    def heavy(parts: list[tuple[str, Any]]) -> tuple[str, Any] | None:
        sizes = [_num_bytes(part) or 0 for _, part in parts]
        most = max(sizes, default=0)
        return parts[sizes.index(most)] if most > num_bytes / 2 else None

    way, part = _descend(value, name, heavy)
    return way, _num_bytes(part) or 0


def _descend(
    value: Any, name: str, choose: Callable[[list[tuple[str, Any]]], tuple[str, Any] | None]
) -> tuple[str, Any]:
    way, seen = [name], {id(value)}
    while len(way) < _MAX_DEPTH:
        chosen = choose([(label, part) for label, part in _parts(value) if id(part) not in seen])
        if chosen is None:
            break
        label, part = chosen
        # What is ours says nothing to the user: the way begins anew with the name of its field.
        way = [label.lstrip(".")] if type(value).__module__.startswith("paceline.") else [*way, label]
        value = part
        seen.add(id(value))
    return " → ".join(way), value


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    match value:
        case FunctionType():
            yield from _variables(value)
        case MethodType():
            yield "the object it is a method of", value.__self__
        case functools.partial():
            yield "the function in the partial", value.func
            yield from ((f"argument {index}", one) for index, one in enumerate(value.args))
            yield from ((f"argument {name!r}", one) for name, one in value.keywords.items())
        case dict():
            yield from ((f"[{key!r}]", one) for key, one in list(value.items()))
        case list() | tuple():
            yield from ((f"[{index}]", one) for index, one in enumerate(value))
        case set() | frozenset():
            yield from (("an element", one) for one in value)
        case type():
            yield from ((f"attribute {name!r}", one) for name, one in list(vars(value).items()) if name[:2] != "__")
        case _:
            yield from ((f".{name}", one) for name, one in list(getattr(value, "__dict__", {}).items()))
            yield "its class", type(value)


def _variables(fn: FunctionType) -> Iterator[tuple[str, Any]]:
    for name, variable in inspect.getclosurevars(fn).nonlocals.items():
        yield f"closure variable {name!r}", variable
    for name in sorted(_names(fn.__code__) & fn.__globals__.keys()):
        yield f"global variable {name!r}", fn.__globals__[name]
    for name, parameter in inspect.signature(fn).parameters.items():
        if parameter.default is not parameter.empty:
            yield f"the default of {name!r}", parameter.default
    if hasattr(fn, "__wrapped__"):
        yield "the function it wraps", fn.__wrapped__


def _names(code: CodeType) -> set[str]:
    """What it refers to by name, the functions inside of it too."""
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def _num_bytes(value: Any) -> int | None:
    """None if it cannot be packed."""
    try:
        return len(parcel.dumps(value))
    except Exception:
        return None
