"""A report on its way from the training loop to the driver.

What a loop does once in a while runs with cold caches, where every line of Python and every library it touches costs
many times what it costs in a tight loop. So the worker does as little as possible: plain values go through marshal,
the smallest serializer there is, and the driver does the stamping.
"""

import marshal
import pickle
from collections.abc import Callable
from typing import Any

from paceline import frameworks
from paceline.errors import ArgumentTypeError
from paceline.workers import parcel

Report = dict[str, Any]

ROWS = "_rows"
"""Where a report has, on the driver, what came with it: which rows were read for it. Not for users."""

_PLAIN = frozenset((int, float, str, bool, type(None)))


def pack(metrics: Report, timestamp: float, elapsed_s: float, iteration: int) -> bytes:
    """Whatever is not a plain number or text is pickled: marshal would take an array for its bytes. ArgumentTypeError
    names a metric that cannot be sent."""
    if _PLAIN.issuperset(map(type, metrics.values())):
        return marshal.dumps((metrics, timestamp, elapsed_s, iteration))
    return marshal.dumps(_pickled((metrics, timestamp, elapsed_s, iteration)))


def with_rows(packed: bytes, rows: bytes | None) -> bytes:
    """A packed report that takes something along: both arrive, or neither does."""
    return packed if rows is None else marshal.dumps((packed, rows))


def unpack(packed: bytes | bytearray) -> Report:
    item = marshal.loads(packed)
    if type(item) is tuple and len(item) == 2:
        return {**_stamped(marshal.loads(item[0])), ROWS: item[1]}
    return _stamped(item)


def _stamped(item: Any) -> Report:
    metrics, timestamp, elapsed_s, iteration = pickle.loads(item) if type(item) is bytes else item
    metrics["_timestamp"] = int(timestamp)
    metrics.setdefault("_time_this_iter_s", elapsed_s)
    metrics["_training_iteration"] = iteration
    report: Report = metrics
    return report


def plain(value: Any) -> Any:
    """Tensors as numbers or arrays: the driver need not have the framework, nor this worker's GPU."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(plain(item) for item in value)
    return frameworks.plain(value)


def _pickled(report: tuple[dict[str, Any], float, float, int]) -> bytes:
    """For metrics that are more than plain values."""
    # Only what torch says of a tensor that numpy does not know: the value may be what a collective was to compute, and
    # its error is the echo of another rank's end.
    metrics = {key: _sendable(key, value, plain, (TypeError, NotImplementedError)) for key, value in report[0].items()}
    try:
        return parcel.dumps((metrics, *report[1:]))
    except Exception as error:
        for key, value in metrics.items():
            _sendable(key, value, parcel.dumps, (Exception,))
        raise ArgumentTypeError(f"These metrics cannot be sent to the driver ({error}).") from error


def _sendable(key: str, value: Any, form: Callable[[Any], Any], refusals: tuple[type[Exception], ...]) -> Any:
    """The value in that form; if it has none, an error with the metric's name."""
    try:
        return form(value)
    except refusals as error:
        raise ArgumentTypeError(
            f"report({key}=...): a {type(value).__qualname__} cannot be sent to the driver "
            f"({type(error).__name__}: {error}). Report numbers, text, arrays or tensors."
        ) from error
