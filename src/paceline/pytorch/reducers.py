"""Metrics that only the user knows how to put together: over batches, then over ranks."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from itertools import chain, zip_longest
from typing import Any

from paceline.errors import ArgumentError, ArgumentTypeError


class MetricReducer(abc.ABC):
    """Collects on each rank, with whatever method of its own the trial calls, and makes one value of all."""

    @abc.abstractmethod
    def reset(self) -> None:
        """Before the first batch of a validation, or after a report of training."""

    @abc.abstractmethod
    def per_slot_reduce(self) -> Any:
        """What this rank has, to be sent to all."""

    @abc.abstractmethod
    def cross_slot_reduce(self, per_slot_metrics: list[Any]) -> Any:
        """The metric, of what `per_slot_reduce` said on each rank."""


class FunctionReducer(MetricReducer):
    """A function of the list of all values that `update` was given, on all ranks: in the order of the batches, if it
    was once for each."""

    def __init__(self, fn: Callable[[list[Any]], Any]):
        self._fn, self._updates = fn, list[Any]()

    def update(self, value: Any) -> None:
        self._updates.append(value)

    def reset(self) -> None:
        self._updates = []

    def per_slot_reduce(self) -> list[Any]:
        return self._updates

    def cross_slot_reduce(self, per_slot_metrics: list[Any]) -> Any:
        return self.over([per_slot_metrics])

    def over(self, groups: list[list[Any]]) -> Any:
        """Of several groups of ranks, one after the other."""
        missing = object()
        in_turn = chain.from_iterable(chain.from_iterable(zip_longest(*ranks, fillvalue=missing)) for ranks in groups)
        return self._fn([value for value in in_turn if value is not missing])


class Reducers:
    """All that were wrapped, in their order, the same on every rank."""

    def __init__(self) -> None:
        self._known: list[tuple[MetricReducer, str | None, bool, bool]] = []
        self.former: list[list[list[Any]]] = []
        """What ranks had collected before restarts: by restart, rank and reducer. They count as further ranks."""

    def wrap(self, given: Any, name: str | None, for_training: bool, for_validation: bool) -> MetricReducer:
        if isinstance(given, MetricReducer):
            reducer: MetricReducer = given
        elif callable(given) and not (isinstance(given, type) and issubclass(given, MetricReducer)):
            reducer = FunctionReducer(given)
        else:
            raise ArgumentTypeError(
                f"wrap_reducer() was given a {type(given).__name__}; expected a pytorch.MetricReducer or a function of "
                "a list."
            )
        if any(known is reducer for known, *_ in self._known):
            raise ArgumentError("wrap_reducer() was given the same reducer twice.")
        self._known.append((reducer, name, for_training, for_validation))
        return reducer

    def of(self, is_training: bool) -> list[tuple[MetricReducer, str | None]]:
        return [(one, name) for one, name, *uses in self._known if uses[0 if is_training else 1]]

    def reset(self, is_training: bool) -> None:
        for reducer, _ in self.of(is_training):
            reducer.reset()

    def state(self, is_training: bool) -> list[Any]:
        """What this rank has, for a checkpoint: `former`, to whom goes on."""
        return [_call(reducer, "per_slot_reduce") for reducer, _ in self.of(is_training)]

    def reduce(self, is_training: bool, allgather: Callable[[Any], list[Any]]) -> dict[str, Any]:
        """Their metrics, on every rank; one exchange for all of them."""
        chosen = self.of(is_training)
        if not chosen:
            return {}
        groups = [*self.former, allgather(self.state(is_training))]
        made: dict[str, Any] = {}
        for index, (reducer, name) in enumerate(chosen):
            value = _across(reducer, [[ranks[index] for ranks in group] for group in groups])
            if name is None and not isinstance(value, Mapping):
                raise ArgumentError(
                    f"The reducer {_name(reducer)} was wrapped without a name and returned a {type(value).__name__}; "
                    "expected a dict of metrics, or give wrap_reducer(name=...)."
                )
            if name is not None and isinstance(value, Mapping):
                raise ArgumentError(
                    f"The reducer {name!r} returned a dict; expected one value, or leave its name out: then the dict's "
                    "names count."
                )
            made |= dict(value) if name is None else {name: value}
        return made


def _across(reducer: MetricReducer, groups: list[list[Any]]) -> Any:
    if isinstance(reducer, FunctionReducer) and len(groups) > 1:
        return _call(reducer, "over", groups)
    return _call(reducer, "cross_slot_reduce", list(chain.from_iterable(groups)))


def _call(reducer: MetricReducer, phase: str, *args: Any) -> Any:
    try:
        return getattr(reducer, phase)(*args)
    except Exception as error:
        raise ArgumentError(f"{_name(reducer)}.{phase}() raised {type(error).__name__}: {error}") from error


def _name(reducer: MetricReducer) -> str:
    inner = getattr(reducer, "_fn", None)
    return getattr(inner, "__qualname__", type(reducer).__qualname__)
