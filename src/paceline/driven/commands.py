"""What the driver sends: commands, in the order of the loop's lines. Values, and pure functions that make them."""

import dis
import inspect
import linecache
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

from paceline.driven.store import Kept, packing
from paceline.errors import ArgumentError, ArgumentTypeError, PacelineError
from paceline.workers import contents, parcel

_OURS = str(Path(__file__).parents[1]) + os.sep


@dataclass(frozen=True)
class Line:
    """A line of the driver's program."""

    file: str
    number: int

    def __str__(self) -> str:
        text = linecache.getline(self.file, self.number).strip()
        return f"{self.file}, line {self.number}" + (f": {text}" if text else "")


@dataclass(frozen=True)
class Command:
    """`fn(*args, **kwargs)`, on every rank. What it gives stays there under the number, or goes to the driver."""

    number: int
    packed: bytes
    tells: bool
    line: Line


@dataclass(frozen=True)
class Forget:
    """The driver has no name for these any more."""

    numbers: tuple[int, ...]


Order = Command | Forget


def pack(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Apart from the other commands: a rank unpacks it when those before it are done, and finds what they have made."""
    named = {
        "the function": fn,
        **{f"argument {index}": value for index, value in enumerate(args)},
        **{f"argument {name!r}": value for name, value in kwargs.items()},
    }
    try:
        with packing(), contents.explained(lambda: named, "What is sent to the workers"):
            return parcel.dumps((fn, args, kwargs, parcel.Brought()))
    except ArgumentTypeError as error:
        if isinstance(error.__cause__, PacelineError):  # it says itself why it does not travel
            raise error.__cause__ from None
        raise


def line_of_caller() -> Line:
    """The innermost line that is not Paceline's own."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return Line(frame.f_code.co_filename, frame.f_lineno)


def arguments_for(fn: Callable[..., Any], given: tuple[Any, ...]) -> tuple[Any, ...]:
    """What `apply(fn, *given)` calls it with. A function that has parameters and is given nothing gets the workers'
    values that it uses, in the order in which it does: `apply(lambda output, labels: criterion(outputs, targets))`."""
    if not callable(fn):
        raise ArgumentTypeError(f"apply({fn!r}): expected a function, got a {type(fn).__name__}.")
    num_required = 0 if given else _num_required(fn)
    used = tuple(used_values(fn)) if num_required else ()
    if num_required != len(used):
        raise ArgumentError(
            f"apply({getattr(fn, '__name__', fn)}): it has {num_required} parameters and was given no values. Give as "
            "many: apply(fn, output, labels)."
        )
    return given or used


def _num_required(fn: Callable[..., Any]) -> int:
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # a builtin that does not tell
        return 0
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(one.kind in positional and one.default is one.empty for one in parameters)


def used_values(fn: Callable[..., Any]) -> Iterator[Kept]:
    """The workers' values among the variables from outside that the function names, each once."""
    if not isinstance(fn, FunctionType):
        return
    outside = {**fn.__globals__, **inspect.getclosurevars(fn).nonlocals}
    seen = set()
    for instruction in dis.get_instructions(fn):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF") and instruction.argval not in seen:
            seen.add(instruction.argval)
            if isinstance(value := outside.get(instruction.argval), Kept):
                yield value
