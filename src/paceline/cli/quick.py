"""Commands that start at once.

Typer checks every value with pydantic, whose import takes longer than to list thousands of runs. What needs no check, a
word where a word is expected or an option that was not given, goes past it here. All else is Typer's, with its errors.
"""

from collections.abc import Callable
from typing import Any

from typer.core import TyperCommand, TyperGroup


class QuickCommand(TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _quicken(self.get_params(ctx))
        return super().parse_args(ctx, args)


class QuickGroup(TyperGroup):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _quicken(self.get_params(ctx))
        return super().parse_args(ctx, args)


def _quicken(params: list[Any]) -> None:
    for param in params:
        # Other versions of Typer have no such thing, and need none.
        if hasattr(param, "type_descriptor") and "process_value" not in vars(param):
            param.process_value = _quick(param, param.process_value)


def _quick(param: Any, slow: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def process_value(ctx: Any, value: Any) -> Any:
        is_plain, plain = _plain(param, value)
        if not is_plain or (param.required and param.value_is_missing(plain)):
            return slow(ctx, value)
        return plain if param.callback is None else param.callback(ctx, param, plain)

    return process_value


def _plain(param: Any, value: Any) -> tuple[bool, Any]:
    """Whether a value needs no check, and what becomes of it."""
    about, annotation = param.type_descriptor.parameter_info, param.type_descriptor.annotation
    if value is None:
        return True, () if param.multiple or param.nargs == -1 else None
    if about.parser is not None:
        return False, None
    if annotation is str:
        return isinstance(value, str), value
    if annotation == list[str] and isinstance(value, list | tuple):
        return all(isinstance(one, str) for one in value), list(value)
    number = _whole(value) if annotation is int else None
    return number is not None and _is_within(number, about), number


def _whole(value: Any) -> int | None:
    if type(value) is int:
        return value
    is_plain = isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 10
    return int(value) if is_plain else None


def _is_within(number: int, about: Any) -> bool:
    return (about.min is None or number >= about.min) and (about.max is None or number <= about.max)
