"""In a worker: a model, an optimizer and batches of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paceline.data.dataset import Dataset
from paceline.driven.worker import Reader
from paceline.prepare.device import get_device, move_batch
from paceline.prepare.model import prepare_model
from paceline.prepare.nesting import map_tensors


def make_model(given: torch.nn.Module | Callable[[], torch.nn.Module], options: dict[str, Any]) -> torch.nn.Module:
    """In step with the other ranks from here on: they begin with the weights of rank 0. Collective."""
    model = given if isinstance(given, torch.nn.Module) else given()
    return prepare_model(model, ddp_kwargs=options)


def make_optimizer(kind: Any, model: torch.nn.Module, options: dict[str, Any]) -> Any:
    """Of a class, with the parameters of the model; or what a function makes of the model."""
    kind = kind or torch.optim.SGD
    return kind(model.parameters(), **options) if isinstance(kind, type) else kind(model, **options)


def make_reader(dataset: Dataset, seed: int, options: dict[str, Any]) -> Reader:
    device = get_device()
    return Reader(dataset, seed, lambda batch: move_batch(batch, device), options)


def detached(value: Any) -> Any:
    """As it travels: on the driver, no gradient leads back to here."""
    return map_tensors(torch.Tensor.detach, value)


def without_grad(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with torch.no_grad():
        return fn(*args, **kwargs)
