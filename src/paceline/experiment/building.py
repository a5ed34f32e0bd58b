"""From a plan to an experiment: the only place where classes that a configuration names are called."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from paceline.errors import ConfigError
from paceline.experiment.plan import Build, Plan
from paceline.experiment.recovery import Kept
from paceline.experiment.suggestions import did_you_mean

logger = logging.getLogger(__name__)


def build_experiment(plan: Plan) -> Any:
    """The experiment of a plan. Optimizers come last, since they need the parameters of the models."""
    sections = {role: make(build) for role, build in plan.sections.items() if role != "optimizers"}
    if "optimizers" in plan.sections:
        names = [name for name, value in plan.sections["optimizers"].kwargs.items() if isinstance(value, Build)]
        params = params_of(sections.get("models"), names)
        sections["optimizers"] = make(plan.sections["optimizers"], params)
    return plan.experiment(**sections)


def make(value: Any, params: Mapping[str, Any] | None = None) -> Any:
    """What a value of a plan stands for. `params` go to the optimizers inside, by name. An error of a constructor says
    which part of the configuration it is about."""
    if isinstance(value, Kept):
        return value.value
    if isinstance(value, list | tuple):
        return type(value)(make(item) for item in value)
    if isinstance(value, dict):
        return {key: make(item) for key, item in value.items()}
    if not isinstance(value, Build):
        return value
    given = {name: (params or {}).get(name) for name in value.kwargs}
    kwargs = {
        name: make_optimizer(one, given[name]) if given[name] is not None else make(one)
        for name, one in value.kwargs.items()
    }
    return _called(value, kwargs)


def make_optimizer(build: Build, params: Any) -> Any:
    return _called(build, {"params": params, **{name: make(one) for name, one in build.kwargs.items()}})


def _called(build: Build, kwargs: Mapping[str, Any]) -> Any:
    try:
        return build.target(*(make(one) for one in build.args), **kwargs)
    except Exception as error:
        if not getattr(error, "__notes__", None):
            error.add_note(f"It was raised by {build.target.__qualname__}, which is {build.path} of the configuration.")
        raise


def models_in(models: Any) -> dict[str, torch.nn.Module]:
    """The models of a container, by name."""
    return {name: one for name, one in _vars(models).items() if isinstance(one, torch.nn.Module)}


def mapping_of(models: Any, optimizers: list[str]) -> dict[str, list[str]]:
    """`map_params_to_optimizers`, checked: from each model that is trained to its optimizers. One model and one
    optimizer need no word."""
    known = models_in(models)
    given = getattr(models, "map_params_to_optimizers", None)
    if given is None and len(known) == len(optimizers) == 1:
        given = {next(iter(known)): optimizers[0]}
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"{type(models).__name__}.map_params_to_optimizers is {given!r}; expected a dict from names of models to "
            'names of optimizers: {"dnn": "adam"}.'
        )
    mapping = {name: _names(name, to) for name, to in given.items()}
    for name, targets in mapping.items():
        if name not in known:
            raise ConfigError(f"map_params_to_optimizers names the model {name!r}.{did_you_mean(name, known)}")
        for target in targets:
            if target not in optimizers:
                raise ConfigError(
                    f"map_params_to_optimizers names the optimizer {target!r}.{did_you_mean(target, optimizers)}"
                )
    return mapping


def _names(model: str, given: Any) -> list[str]:
    """Of optimizers; None is none, and the model is frozen."""
    names = [given] if isinstance(given, str) else [] if given is None else given
    if not isinstance(names, list | tuple | set) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"map_params_to_optimizers maps {model!r} to {given!r}; expected the name of an optimizer, a list of them, "
            "or None for a model that is not trained."
        )
    return list(names)


def params_of(models: Any, optimizers: list[str]) -> dict[str, Any]:
    """What each optimizer gets: the parameters of its model, or a group of them for each of its models."""
    mapping, known = mapping_of(models, optimizers), models_in(models)
    params: dict[str, Any] = {}
    for optimizer in optimizers:
        mapped = [name for name, targets in mapping.items() if optimizer in targets]
        if not mapped:
            raise ConfigError(
                f"optimizers.{optimizer} has no model: map one to it in map_params_to_optimizers, or take it away."
            )
        groups = [list(known[name].parameters()) for name in mapped]
        if len(groups) == 1:
            params[optimizer] = groups[0]
        else:  # parameters that two models share are in one group only
            seen: set[int] = set()
            params[optimizer] = [{"params": _unseen(group, seen)} for group in groups]
    return params


def freeze_unmapped(models: Any, mapping: Mapping[str, list[str]]) -> list[str]:
    """Models without an optimizer are not trained: in eval mode, and without gradients. Gives their names."""
    frozen = [name for name in models_in(models) if not mapping.get(name)]
    shared = {id(p) for name, one in models_in(models).items() if name not in frozen for p in one.parameters()}
    for name in frozen:
        model = getattr(models, name).eval()
        for parameter in model.parameters():
            if id(parameter) not in shared:
                parameter.requires_grad_(False)
    return frozen


def _unseen(group: list[Any], seen: set[int]) -> list[Any]:
    kept = [one for one in group if id(one) not in seen]
    seen.update(id(one) for one in kept)
    return kept


def _vars(container: Any) -> dict[str, Any]:
    """Attributes of a section, in the order in which they were set."""
    if container is None:
        return {}
    inner = dict(getattr(container, "_modules", None) or {})  # a container may be an nn.Module itself
    return {**vars(container), **inner}
