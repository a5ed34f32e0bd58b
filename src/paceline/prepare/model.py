"""A model on its device, in step with the other ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import ArgumentTypeError
from paceline.prepare.autocast import run_in_autocast
from paceline.prepare.device import get_device
from paceline.prepare.group import check_group
from paceline.prepare.scope import current_place, current_scope


def prepare_model(
    model: torch.nn.Module,
    move_to_device: bool = True,
    wrap_ddp: bool = True,
    ddp_kwargs: Mapping[str, Any] | None = None,
) -> torch.nn.Module:
    """Move the model to this worker's device and, with several workers, wrap it in DistributedDataParallel.

    The state dict stays that of the model: it has the same names however many workers there are.

    With mixed precision on (see `accelerate`) its forward runs in autocast and returns float32. A model
    without parameters, such as a loss, is only moved; one without trainable parameters is not wrapped, for
    DDP refuses it; one that is wrapped already is returned itself. Collective when it wraps: every rank must
    call it.
    """
    if not isinstance(model, torch.nn.Module):
        raise ArgumentTypeError(
            f"prepare_model was given {model!r} of type {type(model).__name__}; expected a torch.nn.Module."
        )
    device = get_device()
    is_wrapped = isinstance(model, DistributedDataParallel)
    if move_to_device and not is_wrapped:
        model = model.to(device)
    inner: torch.nn.Module = model.get_submodule("module") if is_wrapped else model
    if next(inner.parameters(), None) is None:
        return model
    scope = current_scope()
    scope.num_models += 1
    if scope.precision is not None:
        run_in_autocast(inner, device.type, scope.precision)
    if is_wrapped or not wrap_ddp or not _needs_wrapping(model):
        return model
    return SharedModel(model, **{**ddp_defaults(device, move_to_device), **(ddp_kwargs or {})})


def unwrap_model(model: torch.nn.Module) -> torch.nn.Module:
    """The bare module of one that `prepare_model` has returned, or of any that DistributedDataParallel, DataParallel or
    `torch.compile` has wrapped; another one itself. With mixed precision its forward still runs in autocast."""
    if not isinstance(model, torch.nn.Module):
        raise ArgumentTypeError(
            f"unwrap_model was given {model!r} of type {type(model).__name__}; expected a torch.nn.Module."
        )
    while True:
        if isinstance(model, DistributedDataParallel | torch.nn.DataParallel):
            model = model.get_submodule("module")
        elif "_orig_mod" in model._modules:  # compiled
            model = model.get_submodule("_orig_mod")
        else:
            return model


class SharedModel(DistributedDataParallel):
    """DistributedDataParallel whose state dict is that of the model it wraps, without "module." before each name: a
    checkpoint fits any number of workers, one among them. So do its other attributes: `model.head` is found too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            inner = vars(self).get("_modules", {}).get("module")
            if inner is None:
                raise
            return getattr(inner, name)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)


@contextmanager
def each_on_its_own(model: torch.nn.Module) -> Iterator[None]:
    """Inside, ranks may call the model differently often, for validation. Collective at its beginning.

    DDP gives rank 0's buffers, such as the statistics of normalization, to all ranks in the first forward after a step
    of training. A rank with no batch to validate on would miss that, and be waited for in vain. So it is done here.
    """
    if not isinstance(model, DistributedDataParallel):
        yield
        return
    model.require_forward_param_sync = True  # it is off after a batch whose gradients stay on their rank
    if model.will_sync_module_buffers():  # type: ignore[no-untyped-call]
        model._sync_buffers()  # type: ignore[no-untyped-call]
    model.require_forward_param_sync = False
    try:
        yield
    finally:
        model.require_forward_param_sync = True


def ddp_defaults(device: torch.device, is_moved: bool) -> dict[str, Any]:
    """DDP wants to know the one GPU of a model, and must not be told of one when it may span several."""
    return {"device_ids": [device], "output_device": device} if device.type == "cuda" and is_moved else {}


def _needs_wrapping(model: torch.nn.Module) -> bool:
    place = current_place()
    if place.world_size == 1 or not any(p.requires_grad for p in model.parameters()):
        return False
    check_group("prepare_model would wrap the model", "pass wrap_ddp=False")
    return True
