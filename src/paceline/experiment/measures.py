"""Losses and metrics: their values over all ranks, and their states in a checkpoint."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from paceline import session
from paceline.experiment.agreement import any_rank

if TYPE_CHECKING:
    from torchmetrics import Metric, MetricCollection

logger = logging.getLogger(__name__)


def measures_in(section: Any) -> dict[str, Metric | MetricCollection]:
    """The metrics of a container, by name. A loss that is none, such as nn.MSELoss, has nothing to compute later."""
    if section is None:
        return {}
    return metrics_among({**getattr(section, "__dict__", {}), **(getattr(section, "_modules", None) or {})})


def metrics_among(named: Mapping[str, Any]) -> dict[str, Metric | MetricCollection]:
    return {name: one for name, one in named.items() if is_measure(one)}


def is_measure(value: Any) -> TypeGuard[Metric | MetricCollection]:
    """Whoever has a metric has imported torchmetrics. Who has none is spared that: it takes longer than torch, and
    brings scipy, matplotlib and transformers along where they are installed."""
    if "torchmetrics" not in sys.modules:
        return False
    from torchmetrics import Metric, MetricCollection

    return isinstance(value, Metric | MetricCollection)


def measures_of_tools(tools: Mapping[str, Any]) -> dict[str, Metric | MetricCollection]:
    """Tools that are metrics, and metrics that tools hold as attributes: they count over all ranks too, and by
    themselves they keep nothing."""
    found: dict[str, Metric | MetricCollection] = {}
    for name, tool in tools.items():
        if is_measure(tool):
            found[f"tools.{name}"] = tool
        elif not isinstance(tool, torch.nn.Module):
            found |= {f"tools.{name}.{key}": one for key, one in measures_in(tool).items()}
    return found


def computed(measures: Mapping[str, Any], told: set[str]) -> dict[str, Any]:
    """The value of each over all ranks. Collective. One that no rank has updated is left out, and named once: `told`
    has those that were."""
    names = list(measures)
    is_updated = any_rank([_was_updated(measures[name]) for name in names])
    values: dict[str, Any] = {}
    for name, is_new in zip(names, is_updated, strict=True):
        if not is_new:
            if name not in told and session.world_rank() == 0:
                logger.warning("%s was not updated since it was reset: it is not reported.", name)
            told.add(name)
            continue
        with warnings.catch_warnings():  # this rank may have had no batch, and another some
            warnings.filterwarnings("ignore", message=".*before the ``update`` method.*")
            value = measures[name].compute()
        values |= {f"{name}/{key}": one for key, one in value.items()} if isinstance(value, dict) else {name: value}
    return {name: _number(value) for name, value in values.items()}


def _was_updated(measure: Metric | MetricCollection) -> bool:
    return any(one.update_called for one in _single(measure))


def _single(measure: Metric | MetricCollection) -> list[Metric]:
    """Those that count: the metric itself, those of a collection, and those that it wraps or is computed from."""
    from torchmetrics import Metric, MetricCollection

    held: Iterable[Any] = measure.values() if isinstance(measure, MetricCollection) else [measure]
    return [one for metric in held for one in metric.modules() if isinstance(one, Metric)]


def _number(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value.detach().cpu()
    return value


def states_of(measures: Mapping[str, Any]) -> dict[str, Any]:
    """What each has counted on this rank so far."""
    return {
        name: [{"count": one._update_count, "state": _copied(one.metric_state)} for one in _single(measure)]
        for name, measure in measures.items()
    }


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, list) else value.detach().clone() for key, value in state.items()}


def restore_states(measures: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """On the rank that had them."""
    for name, measure in measures.items():
        for one, kept in zip(_single(measure), own.get(name, []), strict=False):
            _set(one, kept["count"], kept["state"])


def share_states(
    measures: Mapping[str, Any], everybody: list[Mapping[str, Any]], rank: int, world_size: int
) -> list[str]:
    """After a change of the number of ranks: rank 0 has what all have summed and collected; what is a mean or an
    extreme of all, so that twice the same is the same, everybody has; of what has no such rule, each rank has what one
    rank had. Gives the names of those for which there are too few ranks for that: they begin anew."""
    lost = []
    for name, measure in measures.items():
        for place, one in enumerate(_single(measure)):
            parts = [kept[name][place] for kept in everybody if name in kept and place < len(kept[name])]
            used = [part for part in parts if part["count"]]
            if used and not _share(one, used, rank, world_size):
                one.reset()
                lost.append(name)
    return lost


def _share(measure: Metric, parts: list[Mapping[str, Any]], rank: int, world_size: int) -> bool:
    state: dict[str, Any] = {}
    reductions: Mapping[str, Any] = measure._reductions
    for key, reduction in reductions.items():
        values = [part["state"][key] for part in parts]
        if reduction is None and not isinstance(values[0], list):
            if len(parts) > world_size:  # what becomes of several, only the metric's own `compute` knows
                return False
            state |= {key: values[rank]} if rank < len(parts) else {}
            continue
        value, is_for_all = _joined(reduction, values)
        state |= {key: value} if rank == 0 or is_for_all else {}
    _set(measure, max(part["count"] for part in parts), state)
    return True


def _joined(reduction: Any, values: list[Any]) -> tuple[Any, bool]:
    """One of several, and whether every rank may have it."""
    from torchmetrics.utilities.data import dim_zero_cat, dim_zero_sum

    if isinstance(values[0], list):
        return [item for value in values for item in value], False
    if reduction is dim_zero_cat:
        return torch.cat(values), False
    value = reduction(torch.stack(values))
    return value, torch.equal(reduction(torch.stack([value, value])), value) and reduction is not dim_zero_sum


def _set(measure: Metric, count: int, state: Mapping[str, Any]) -> None:
    for key, value in state.items():
        moved = [item.to(measure.device) for item in value] if isinstance(value, list) else value.to(measure.device)
        setattr(measure, key, moved)
    measure._update_count, measure._computed = count, None
