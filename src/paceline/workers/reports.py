"""A report on its way from the training loop to the driver.

What a loop does once in a while runs with cold caches, where every line of Python and every library it touches costs
many times what it costs in a tight loop. So the worker does as little as possible: plain values go through marshal,
the smallest serializer there is, and the driver does the stamping. Reports follow each other without any frame, since
marshal knows where a value ends.
"""

import io
import marshal
import pickle
from collections.abc import Callable
from typing import Any

Report = dict[str, Any]

_PLAIN = frozenset((int, float, str, bool, type(None)))


def pack(metrics: Report, timestamp: float, elapsed_s: float, iteration: int, pickled: Callable[[Any], bytes]) -> bytes:
    """`pickled` is asked for whatever is not a plain number or text: marshal would take an array for its bytes."""
    if _PLAIN.issuperset(map(type, metrics.values())):
        return marshal.dumps((metrics, timestamp, elapsed_s, iteration))
    return marshal.dumps(pickled((metrics, timestamp, elapsed_s, iteration)))


def unpack(packed: bytes) -> Report:
    return _stamped(marshal.loads(packed))


class ReportReader:
    """Reports out of a stream of bytes that arrives in pieces. A torn one at its end never shows."""

    def __init__(self) -> None:
        self._rest = b""

    def reports(self, data: bytes) -> list[Report]:
        stream = io.BytesIO(self._rest + data)
        found = []
        start = 0
        while True:
            try:
                item = marshal.load(stream)
            except (EOFError, ValueError, TypeError):  # the rest of it is still to come
                break
            found.append(_stamped(item))
            start = stream.tell()
        self._rest = stream.getvalue()[start:]
        return found


def _stamped(item: Any) -> Report:
    metrics, timestamp, elapsed_s, iteration = pickle.loads(item) if type(item) is bytes else item
    metrics["_timestamp"] = int(timestamp)
    metrics.setdefault("_time_this_iter_s", elapsed_s)
    metrics["_training_iteration"] = iteration
    report: Report = metrics
    return report
