"""How a call ended, for the trip from the worker to the driver."""

import traceback
from typing import Any

from paceline.errors import TrainFunctionError
from paceline.workers import parcel
from paceline.workers.base import Raised, Returned

Error = tuple[str, str, str, bytes | None]
"""Type name, message, traceback, and the packed exception if it can travel."""


def pack_value(value: Any) -> bytes:
    try:
        return parcel.dumps(value)
    except Exception as error:
        raise TrainFunctionError(
            f"The function returned a {type(value).__qualname__} that cannot be pickled for the trip to the driver"
            f" ({type(error).__name__}: {error}). Return plain values, tensors or state dicts."
        ) from error


def describe_error(error: BaseException) -> Error:
    """What a Raised event needs. An exception that does not survive pickling goes home as text alone."""
    text = "".join(traceback.format_exception(error))
    error.__traceback__ = None
    try:
        packed = parcel.dumps(error)
        parcel.loads(packed)
    except Exception:
        packed = None
    return type(error).__qualname__, str(error), text, packed


def returned(rank: int, payload: bytes) -> Returned | Raised:
    """On the driver. A value that it cannot unpickle is an error of the function that returned it."""
    try:
        return Returned(rank, parcel.loads(payload))
    except Exception as error:
        message = (
            f"The function ended on rank {rank}, but the driver cannot unpickle the value it returned "
            f"({type(error).__name__}: {error}). Return plain values, or define the class where the driver can import "
            "it."
        )
        return Raised(rank, type(error).__qualname__, message, traceback.format_exc(), TrainFunctionError(message))


def raised(rank: int, error: Error) -> Raised:
    type_name, message, text, packed = error
    return Raised(rank, type_name, message, text, parcel.loads(packed) if packed else None)
