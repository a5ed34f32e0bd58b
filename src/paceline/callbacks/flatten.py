"""Reported dicts as trackers want them: one level deep, with plain numbers."""

from collections.abc import Mapping
from typing import Any

BOOKKEEPING_KEYS = frozenset({"_pid", "_timestamp", "_time_total_s", "_training_iteration"})
"""Filled in by report() for every step, and no metric of the training."""


def flatten(result: Mapping[Any, Any]) -> dict[str, Any]:
    """`{"a": {"b": 1}}` becomes `{"a/b": 1}`, at any depth. An empty dict leaves nothing."""
    flat: dict[str, Any] = {}
    for key, value in result.items():
        if isinstance(value, Mapping):
            flat.update({f"{key}/{name}": inner for name, inner in flatten(value).items()})
        else:
            flat[str(key)] = value
    return flat


def as_number(value: Any) -> int | float | None:
    """The value as a Python number, or None if it is none. Knows numpy scalars and 0-d arrays and tensors."""
    if isinstance(value, int | float):
        return value
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        plain = value.item()
        return plain if isinstance(plain, int | float) else None
    return None


def numeric_metrics(result: Mapping[Any, Any]) -> dict[str, int | float]:
    """The numbers of one worker's report, flat and without the bookkeeping."""
    flat = flatten({key: value for key, value in result.items() if key not in BOOKKEEPING_KEYS})
    numbers = ((key, as_number(value)) for key, value in flat.items())
    return {key: number for key, number in numbers if number is not None}


def step_of(result: Mapping[Any, Any]) -> int:
    """The report's number in its run, from 1 on; 0 if it is not stamped."""
    return int(result.get("_training_iteration", 0))
