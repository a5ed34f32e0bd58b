"""How a call ended, for the trip from the worker to the driver."""

import os
import traceback
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from paceline.errors import TrainFunctionError
from paceline.workers import parcel
from paceline.workers.base import Raised, Returned

Error = tuple[str, str, str, bytes | None]
"""Type name, message, traceback, and the packed exception if it can travel."""

_MOST_CHARACTERS = 100_000
"""Of a message, and of a traceback with it. The exception itself has all of what it says, if it can travel."""

_OURS = str(Path(__file__).parents[1]) + os.sep


def pack_value(value: Any) -> bytes:
    try:
        return parcel.dumps(value)
    except Exception as error:
        raise TrainFunctionError(
            "What the function returned cannot be pickled for the trip to the driver"
            f" ({type(error).__name__}: {error}). Return plain values, tensors or state dicts."
        ) from error


def describe_error(error: BaseException) -> Error:
    """What a Raised event needs. An exception that does not survive pickling goes home as text alone. Whatever the
    methods of its class do, this does not raise: nobody would tell the driver that the call has ended."""
    text = text_of(error)
    BaseException.with_traceback(error, None)  # not an assignment, which a frozen class refuses
    packed = _packed(error)
    return type(error).__qualname__, message_of(error), text, packed


def message_of(error: BaseException) -> str:
    """What it says, or that it does not."""
    if isinstance(error, SystemExit):
        return _bounded(f"the function ended itself with sys.exit({error.code!r})")
    try:
        return _bounded(str(error))
    except BaseException as second:
        return f"(its message cannot be had: __str__ raises {type(second).__qualname__})"


def text_of(error: BaseException) -> str:
    """The traceback, as Python prints it, from the user's first line on: how we have come there is no news."""
    trace = _from_users_line(error.__traceback__)
    try:
        return _bounded("".join(traceback.format_exception(type(error), error, trace)))
    except BaseException:
        return "".join([*traceback.format_tb(trace), f"{type(error).__qualname__}: {message_of(error)}\n"])


def _bounded(text: str) -> str:
    """Its beginning and its end."""
    if len(text) <= _MOST_CHARACTERS:
        return text
    half = _MOST_CHARACTERS // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters are left out …\n{text[-half:]}"


def _from_users_line(trace: TracebackType | None) -> TracebackType | None:
    """All of it if there is no such line."""
    found = trace
    while found is not None and found.tb_frame.f_code.co_filename.startswith(_OURS):
        found = found.tb_next
    return found or trace


def _packed(error: BaseException) -> bytes | None:
    try:
        packed = parcel.dumps(error)
    except BaseException:  # its own __reduce__ may raise anything
        return None
    return packed if _unpacked(packed) is not None else None


def _unpacked(packed: bytes) -> BaseException | None:
    try:
        error = parcel.loads(packed)
    except BaseException:
        return None
    return error if isinstance(error, BaseException) else None


def returned(rank: int, payload: bytes) -> Returned | Raised:
    """On the driver. A value that it cannot unpickle is an error of the function that returned it."""
    try:
        return Returned(rank, parcel.loads(payload))
    except (Exception, SystemExit) as error:  # the latter would end the driver, and well, if its code is 0
        message = (
            f"The function ended on rank {rank}, but the driver cannot unpickle the value it returned "
            f"({type(error).__name__}: {error}). Return plain values, or define the class where the driver can import "
            "it."
        )
        return Raised(rank, type(error).__qualname__, message, traceback.format_exc(), TrainFunctionError(message))


def raised(rank: int, error: Error) -> Raised:
    """On the driver. It may lack the exception's class: then there is the text."""
    type_name, message, text, packed = error
    return Raised(rank, type_name, message, text, partial(_unpacked, packed) if packed else None)
