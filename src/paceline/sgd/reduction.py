"""The mean of gradients, always summed in the same order: whoever computes it gets the same bits. Pure."""

from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np

from paceline.sgd.packing import Array, Gradients, Layout, Segment

Used = Sequence[bool] | None
"""By slot, whether there was a gradient; None if there was one for each."""


def used_of(replicas: Sequence[Gradients]) -> Used:
    """By any of the replicas."""
    if all(gradient is not None for gradients in replicas for gradient in gradients):
        return None
    return [any(one is not None for one in slot) for slot in zip(*replicas, strict=True)]


def union(parts: Sequence[Used]) -> Used:
    """Of several workers."""
    some = [part for part in parts if part is not None]
    return None if len(some) < len(parts) else [any(slot) for slot in zip(*some, strict=True)]


def sum_into(views: Sequence[Array], replicas: Sequence[Gradients]) -> None:
    """The sum over the replicas of one worker, in their order. No gradient counts as zeros: the mean is over all."""
    for index, view in enumerate(views):
        for number, gradients in enumerate(replicas):
            gradient = gradients[index]
            if number == 0:
                view[...] = 0 if gradient is None else gradient
            elif gradient is not None:
                np.add(view, gradient, out=view)


def mean_into(target: Array, sources: Sequence[Array], segments: Sequence[Segment], divisor: float) -> None:
    """Of buffers, in their order, those segments."""
    for segment in segments:
        out, *parts = (one[segment.start : segment.stop].view(segment.dtype) for one in (target, *sources))
        np.copyto(out, parts[0])
        for part in parts[1:]:
            np.add(out, part, out=out)
        np.divide(out, divisor, out=out)


def gradients_in(layout: Layout, buffer: Array, used: Used) -> list[Array | None]:
    views: list[Any] = layout.views(buffer)
    return views if used is None else [view if is_used else None for view, is_used in zip(views, used, strict=True)]


def combined(metrics: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of all replicas: numbers as their mean, without those that are not a number; anything else is the first's."""
    if not any(metrics):
        return {}
    names = dict.fromkeys(name for one in metrics for name in one)
    return {name: _combined([one[name] for one in metrics if name in one]) for name in names}


def _combined(values: Sequence[Any]) -> Any:
    if not all(isinstance(value, Real) and not isinstance(value, bool) for value in values):  # numpy's float32, too
        return values[0]
    real = [float(value) for value in values if value == value]
    return sum(real) / len(real) if real else float("nan")
