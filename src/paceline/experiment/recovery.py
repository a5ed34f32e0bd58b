"""With which arguments a default was made: `Adam(DUMMY_PARAMS, lr=3e-4)` in a signature is an object by the time that
anybody can look, and its class's own defaults are not what its author wrote.

Each way is a function of its own, and `recover` tries them from the surest to the least sure: what the object says
itself, what stands in the source, what its attributes are called.
"""

import ast
import dataclasses
import functools
import inspect
import sys
import textwrap
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.experiment.signatures import EMPTY, Factory, constructor_of, signature_of
from paceline.experiment.values import VALUES, is_plain


@dataclass(frozen=True)
class Call:
    """How an object was made. Arguments are plain values, calls, containers of both, or Kept."""

    target: type
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    how: str = "signature"
    unknown: tuple[str, ...] = ()
    """Parameters without a default of which nothing is known."""


@dataclass(frozen=True)
class Kept:
    """A value that a configuration cannot hold, such as a function: it stays in the code."""

    value: Any


def recover(owner: type, name: str, default: Any) -> Any:
    """What the default of a parameter is in a configuration: a plain value, a Call, a container of these, or Kept."""
    if isinstance(default, Factory):
        if inspect.isclass(default.make) and default.make.__module__ != "builtins":
            return Call(default.make, how="source")
        return _of_object(default.make())
    if is_plain(default):
        return default
    ways = (explicit, lambda one: written(owner, name, one), by_attributes)
    found = next((found for found in (way(default) for way in ways) if found is not None), None)
    return found if found is not None and is_configurable(found) else Kept(default)


def is_configurable(found: Any) -> bool:
    """Whether it can be written down. An argument that cannot may stay in the code if it has a name, and only then."""
    if isinstance(found, Call):
        named = all(isinstance(one, Kept) or is_configurable(one) for one in found.kwargs.values())
        return named and all(map(is_configurable, found.args)) and not is_value_class(found.target)
    if isinstance(found, list | tuple):
        return all(map(is_configurable, found))
    if isinstance(found, dict):
        return all(isinstance(key, str) for key in found) and all(map(is_configurable, found.values()))
    return is_plain(found)


def explicit(default: Any) -> Call | None:
    """By the object's own word: `__config__()` gives the arguments as a dict. A dataclass says it by its fields."""
    cls = type(default)
    if callable(getattr(cls, "__config__", None)):
        return Call(cls, kwargs={key: _of_object(item) for key, item in default.__config__().items()}, how="__config__")
    if dataclasses.is_dataclass(cls):
        fields = [one.name for one in dataclasses.fields(cls) if one.init]
        return Call(cls, kwargs={key: _of_object(getattr(default, key)) for key in fields}, how="dataclass")
    return None


def written(owner: type, name: str, default: Any) -> Any:
    """By the expression in the source of the owner's constructor, in which classes are not called again. None if it
    cannot be found, or does not lead to the default as it is now."""
    function = constructor_of(owner)
    expression = None if function is None else _default_expression(function, name)
    if expression is None or _is_made_by_function(expression, function.__globals__):
        return None  # what a function does besides, it would do again
    names = ChainMap(dict(vars(owner)), function.__globals__)
    try:
        found = _read(expression, names)
    except Exception:  # it is the user's code: a name that is local, gone or means something else now
        return None
    return found if _fits(found, default) else None


def by_attributes(default: Any) -> Call | None:
    """By attributes that are called like parameters; an optimizer has its own in `defaults`. The least sure way: what
    is not found is taken from the signature, or unknown."""
    signature = signature_of(type(default))
    if signature is None or isinstance(default, type) or inspect.isroutine(default):
        return None
    defaults = getattr(default, "defaults", None)
    places = [defaults if isinstance(defaults, dict) else {}, _attributes(default)]
    kwargs, unknown = {}, []
    for parameter in signature.parameters:
        found = [place[parameter.name] for place in places if parameter.name in place]
        if found and is_plain(found[0]):
            kwargs[parameter.name] = found[0]
        elif parameter.default is EMPTY:
            unknown.append(parameter.name)
    return Call(type(default), kwargs=kwargs, how="attributes", unknown=tuple(unknown))


def _attributes(value: Any) -> dict[str, Any]:
    try:
        return dict(vars(value))
    except TypeError:  # it has slots
        return {}


def _of_object(value: Any) -> Any:
    """Of an object that is an argument of another, where no source says how it was made."""
    if is_plain(value):
        return value
    return explicit(value) or by_attributes(value) or Kept(value)


def _default_expression(function: Any, name: str) -> ast.expr | None:
    try:
        [definition] = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    if not isinstance(definition, ast.FunctionDef):
        return None
    args = definition.args
    positional = [*args.posonlyargs, *args.args]
    late = zip(positional[len(positional) - len(args.defaults) :], args.defaults, strict=True)
    pairs = [*late, *zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    return next((default for arg, default in pairs if arg.arg == name), None)


def _is_made_by_function(node: ast.expr, names: Mapping[str, Any]) -> bool:
    if not isinstance(node, ast.Call):
        return False
    try:
        return not inspect.isclass(_value(node.func, names))
    except Exception:
        return True


def _read(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """An expression as a plain value or calls; as Kept if it is more than can be written down. Raises whatever the
    expression raises."""
    found = _read_parts(node, names)
    return found if isinstance(found, Kept) or is_configurable(found) else Kept(_value(node, names))


def _read_parts(node: ast.expr, names: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.List):
        return [_read(item, names) for item in node.elts]
    if isinstance(node, ast.Tuple):
        return tuple(_read(item, names) for item in node.elts)
    if isinstance(node, ast.Dict) and all(key is not None for key in node.keys):
        keys = [_value(key, names) for key in node.keys if key is not None]
        return dict(zip(keys, [_read(item, names) for item in node.values], strict=True))
    if isinstance(node, ast.Call):
        target = _value(node.func, names)
        if inspect.isclass(target) and not is_value_class(target):
            return _read_call(target, node, names)
    value = _value(node, names)
    if is_plain(value):
        return value
    if isinstance(node, ast.Name) and (found := _assigned(node.id, names)) is not None:
        return _read(found, names)
    return _of_object(value)


def _read_call(target: type, node: ast.Call, names: Mapping[str, Any]) -> Call:
    args: list[Any] = []
    for arg in node.args:
        args += (
            [_of_object(one) for one in _value(arg.value, names)]
            if isinstance(arg, ast.Starred)
            else [_read(arg, names)]
        )
    kwargs: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            kwargs |= {key: _of_object(item) for key, item in _value(keyword.value, names).items()}
        else:
            kwargs[keyword.arg] = _read(keyword.value, names)
    return _by_name(Call(target, tuple(args), kwargs, how="source"))


def is_value_class(cls: type) -> bool:
    """Whether its objects are values, which are written down as such or not at all: `Path("x")`, `dict(a=1)`."""
    return cls.__module__ == "builtins" or issubclass(cls, VALUES) or cls is functools.partial


def _by_name(call: Call) -> Call:
    """With keywords instead of positional arguments, as far as these have names."""
    bound = inspect.signature(call.target).bind_partial(*call.args, **call.kwargs)
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            args = value
        elif kind is inspect.Parameter.VAR_KEYWORD:
            kwargs |= value
        else:
            kwargs[name] = value
    return dataclasses.replace(call, args=args, kwargs=kwargs)


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """What Python gave it when the module was imported. It is the user's own code, which has run already."""
    return eval(compile(ast.Expression(node), "<default>", "eval"), dict(names))


def _assigned(name: str, names: Mapping[str, Any]) -> ast.expr | None:
    """What a module assigns to a name, if it does so once."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[names["__name__"]]))
    except (OSError, TypeError, SyntaxError, KeyError):
        return None
    found = []
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(one, ast.Name) and one.id == name for one in targets):
            found.append(getattr(node, "value", None))
    return found[0] if len(found) == 1 else None


def _fits(found: Any, default: Any) -> bool:
    """Whether the expression can have made the default. A class with a `__new__` of its own may have made another."""
    if isinstance(found, Call):
        is_factory = constructor_of(found.target) is not None and constructor_of(found.target).__name__ == "__new__"
        return type(default) is found.target or is_factory
    if isinstance(found, list | tuple):
        return type(found) is type(default) and len(found) == len(default)
    return isinstance(found, Kept) or type(found) is type(default)
