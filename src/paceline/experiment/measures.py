"""Losses and metrics: their values over all ranks, and their states in a checkpoint."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_sum

from paceline import session
from paceline.experiment.agreement import any_rank

logger = logging.getLogger(__name__)


def measures_in(section: Any) -> dict[str, Metric | MetricCollection]:
    """The metrics of a container, by name. A loss that is none, such as nn.MSELoss, has nothing to compute later."""
    if section is None:
        return {}
    held = {**vars(section), **(getattr(section, "_modules", None) or {})}
    return {name: one for name, one in held.items() if isinstance(one, Metric | MetricCollection)}


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


def share_states(measures: Mapping[str, Any], everybody: list[Mapping[str, Any]], rank: int) -> None:
    """After a change of the number of ranks: rank 0 has what all have summed and collected; what is a mean or an
    extreme of all, so that twice the same is the same, everybody has."""
    for name, measure in measures.items():
        for place, one in enumerate(_single(measure)):
            parts = [kept[name][place] for kept in everybody if name in kept and place < len(kept[name])]
            used = [part for part in parts if part["count"]]
            if len(used) > 1 and _is_bound_to_ranks(one, used[0]["state"]):
                if rank == 0:
                    logger.warning(
                        "%s begins anew: the number of ranks has changed, and it does not say how what two ranks have "
                        "counted becomes one (dist_reduce_fx is None).",
                        name,
                    )
            elif used:
                _share(one, used, rank)


def _is_bound_to_ranks(measure: Metric, state: Mapping[str, Any]) -> bool:
    """Whether a state is only ever gathered, a row for each rank, and never made one."""
    return any(reduction is None and not isinstance(state[key], list) for key, reduction in measure._reductions.items())


def _share(measure: Metric, parts: list[Mapping[str, Any]], rank: int) -> None:
    state: dict[str, Any] = {}
    reductions: Mapping[str, Any] = measure._reductions
    for key, reduction in reductions.items():
        values = [part["state"][key] for part in parts]
        value: Any
        if isinstance(values[0], list):
            value, is_one_s = [item for part in values for item in part], True
        elif reduction is None:
            value, is_one_s = values[0], True  # the only one
        elif reduction is dim_zero_cat:
            value, is_one_s = torch.cat(values), True
        else:
            value = reduction(torch.stack(values))
            is_one_s = reduction is dim_zero_sum or not torch.equal(reduction(torch.stack([value, value])), value)
        if rank == 0 or not is_one_s:
            state[key] = value
    _set(measure, max(part["count"] for part in parts), state)


def _set(measure: Metric, count: int, state: Mapping[str, Any]) -> None:
    for key, value in state.items():
        moved = [item.to(measure.device) for item in value] if isinstance(value, list) else value.to(measure.device)
        setattr(measure, key, moved)
    measure._update_count, measure._computed = count, None
