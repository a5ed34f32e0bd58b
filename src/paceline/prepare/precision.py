"""`accelerate`: prepare everything at once, and choose the precision it computes in."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from paceline.errors import ArgumentError, ArgumentTypeError, TrainerStateError
from paceline.prepare.device import get_device
from paceline.prepare.loader import PreparedDataLoader, prepare_data_loader
from paceline.prepare.model import prepare_model
from paceline.prepare.optimizer import prepare_optimizer
from paceline.prepare.scope import Precision, current_scope


def accelerate(*objects: Any, mixed_precision: bool | str | None = None) -> Any:
    """Prepare models, losses, optimizers and loaders; return them in the order given (none: None).

    `mixed_precision`: None leaves it as it is (off, at first), False is off, True takes what suits the
    device, "bf16" and "fp16" say so. It holds for everything prepared from now on in this run, so it must
    come before the first model or optimizer; saying the same again is fine.
    """
    for given in objects:
        _check_type(given)
    if mixed_precision is not None:
        _choose(mixed_precision)
    prepared = tuple(_prepare(given) for given in objects)
    if not prepared:
        return None
    return prepared if len(prepared) > 1 else prepared[0]


def resolve_precision(mixed_precision: bool | str, device_type: str, *, bf16_supported: bool) -> Precision | None:
    """Pure: what a request means on a device. The CPU computes bfloat16 only."""
    if mixed_precision is False:
        return None
    if mixed_precision is True:
        return "bf16" if device_type == "cpu" or bf16_supported else "fp16"
    if mixed_precision == "fp16" and device_type == "cpu":
        raise ArgumentError(
            "mixed_precision='fp16' needs a GPU, and this worker computes on the CPU: use "
            "mixed_precision='bf16', or True for what suits the device."
        )
    if mixed_precision == "bf16":
        return "bf16"
    if mixed_precision == "fp16":
        return "fp16"
    raise ArgumentError(f"mixed_precision={mixed_precision!r}; expected True, False, None, 'bf16' or 'fp16'.")


def _choose(mixed_precision: bool | str) -> None:
    scope, device = current_scope(), get_device()
    supported = device.type == "cuda" and torch.cuda.is_bf16_supported()
    precision = resolve_precision(mixed_precision, device.type, bf16_supported=supported)
    if precision == scope.precision:
        return
    if scope.num_models or scope.num_optimizers:
        raise TrainerStateError(
            f"mixed_precision={mixed_precision!r} comes too late: {scope.num_models} models and "
            f"{scope.num_optimizers} optimizers were prepared with {scope.precision or 'full precision'}. "
            "Call accelerate(mixed_precision=...) before prepare_model and prepare_optimizer."
        )
    scope.precision = precision
    scope.scaler = torch.amp.GradScaler(device.type) if precision == "fp16" else None


def _check_type(given: Any) -> None:
    known = (torch.nn.Module, Optimizer, DataLoader, PreparedDataLoader)
    if not isinstance(given, known) and not inspect.isroutine(given):
        raise ArgumentTypeError(
            f"accelerate was given {given!r} of type {type(given).__name__}; expected modules, optimizers, "
            "data loaders or a loss function."
        )


def _prepare(given: Any) -> Any:
    if isinstance(given, torch.nn.Module):
        return prepare_model(given)
    if isinstance(given, Optimizer):
        return prepare_optimizer(given)
    if isinstance(given, DataLoader | PreparedDataLoader):
        return prepare_data_loader(given)
    return given  # a loss that is a plain function has nothing to prepare
