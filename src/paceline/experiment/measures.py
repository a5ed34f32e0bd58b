"""Losses and metrics: their values over all ranks, and their states in a checkpoint."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum

from paceline import session
from paceline.experiment.agreement import any_rank

logger = logging.getLogger(__name__)


def measures_in(section: Any) -> dict[str, Metric | MetricCollection]:
    """The metrics of a container, by name. A loss that is none, such as nn.MSELoss, has nothing to compute later."""
    if section is None:
        return {}
    return metrics_among({**getattr(section, "__dict__", {}), **(getattr(section, "_modules", None) or {})})


def metrics_among(named: Mapping[str, Any]) -> dict[str, Metric | MetricCollection]:
    return {name: one for name, one in named.items() if isinstance(one, Metric | MetricCollection)}


def measures_of_tools(tools: Mapping[str, Any]) -> dict[str, Metric | MetricCollection]:
    """Tools that are metrics, and metrics that tools hold as attributes: they count over all ranks too, and by
    themselves they keep nothing."""
    found: dict[str, Metric | MetricCollection] = {}
    for name, tool in tools.items():
        if isinstance(tool, Metric | MetricCollection):
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


def _single(measure: Metric | MetricCollection) -> Iterable[Metric]:
    return list(measure.values()) if isinstance(measure, MetricCollection) else [measure]


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
    extreme of all, everybody has; of what has no such rule, each rank has what one rank had. Gives the names of those
    for which there are too few ranks for that: they begin anew."""
    lost = []
    for name, measure in measures.items():
        for place, one in enumerate(_single(measure)):
            parts = [kept[name][place] for kept in everybody if name in kept]
            if parts and any(part["count"] for part in parts) and not _share(one, parts, rank, world_size):
                one.reset()
                lost.append(name)
    return lost


def _share(measure: Metric, parts: list[Mapping[str, Any]], rank: int, world_size: int) -> bool:
    state: dict[str, Any] = {}
    for key, reduction in measure._reductions.items():
        values = [part["state"][key] for part in parts]
        if isinstance(values[0], list):
            state |= {key: [item for value in values for item in value]} if rank == 0 else {}
        elif reduction in (dim_zero_sum, dim_zero_cat):
            joined = torch.cat(values) if reduction is dim_zero_cat else dim_zero_sum(torch.stack(values))
            state |= {key: joined} if rank == 0 else {}
        elif reduction in (dim_zero_mean, dim_zero_max, dim_zero_min):
            state[key] = reduction(torch.stack(values))
        elif len(parts) > world_size:  # what becomes of several, only the metric's own `compute` knows
            return False
        elif rank < len(parts):
            state[key] = values[rank]
    _set(measure, max(part["count"] for part in parts), state)
    return True


def _set(measure: Metric, count: int, state: Mapping[str, Any]) -> None:
    for key, value in state.items():
        moved = [item.to(measure.device) for item in value] if isinstance(value, list) else value.to(measure.device)
        setattr(measure, key, moved)
    measure._update_count, measure._computed = count, None
