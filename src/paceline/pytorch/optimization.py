"""Models, optimizers, schedulers and the scaler of a trial, and what happens to them at a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau

from paceline.errors import ArgumentError, ArgumentTypeError, TrainerStateError
from paceline.prepare.autocast import run_in_autocast
from paceline.prepare.device import get_device
from paceline.prepare.model import each_on_its_own, prepare_model, unwrap_model
from paceline.profiling.clock import Clock, section
from paceline.pytorch.schedulers import Moment, StepMode, is_update, num_steps


class LRScheduler:
    """A scheduler that steps by itself: what `wrap_lr_scheduler` makes note of. For older code, which constructs it."""

    StepMode = StepMode

    def __init__(self, scheduler: Any, step_mode: Any, frequency: int = 1):
        if not isinstance(step_mode, StepMode):
            raise ArgumentTypeError(
                f"step_mode is {step_mode!r}; expected one of {', '.join(str(mode) for mode in StepMode)}."
            )
        if isinstance(frequency, bool) or not isinstance(frequency, int) or frequency < 1:
            raise ArgumentError(f"frequency={frequency!r}: expected a whole number, at least 1.")
        if isinstance(scheduler, ReduceLROnPlateau) and step_mode is not StepMode.MANUAL_STEP:
            raise ArgumentError(
                "ReduceLROnPlateau steps with a metric: wrap it with StepMode.MANUAL_STEP, and call its step(metric) "
                "in a callback's on_validation_end()."
            )
        self.scheduler, self.step_mode, self.frequency = scheduler, step_mode, frequency


@dataclass
class _Optimizer:
    optimizer: torch.optim.Optimizer
    averages: bool | None
    """Whether gradients of several batches are averaged; None: as the Trainer is told."""


class Optimization:
    """All that is trained, in the order in which it was wrapped."""

    def __init__(self, aggregation_frequency: int):
        self.models: list[torch.nn.Module] = []
        self._optimizers: list[_Optimizer] = []
        self.schedulers: list[LRScheduler] = []
        self.scaler: torch.amp.GradScaler | None = None
        self.is_automatic = False
        """Mixed precision without a word in the trial's code."""
        self.aggregation_frequency = aggregation_frequency
        self.averages = True
        self.is_update = True
        """Whether the optimizers step at the batch that is under way."""
        self._num_ended = 0
        """Epochs that ended since the optimizers stepped."""
        self._is_scale_used = False
        """Whether an optimizer stepped in this batch by the automatic scaler, which has to hear of that, and of nothing
        else: some trials step only now and then."""
        self.is_alone = False
        """Whether models stay this rank's own affair, for a trial that trains nothing."""
        self.clock: Clock | None = None
        """Of a profiler, while it measures."""

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [one.optimizer for one in self._optimizers]

    @property
    def follows_batches(self) -> bool:
        """Whether there is anything to do after a batch."""
        return bool(self.schedulers) or self.is_automatic

    def wrap_model(self, model: torch.nn.Module, compile: bool | dict[str, Any], ddp_kwargs: Any) -> Any:
        if self.is_automatic:
            device = get_device()
            run_in_autocast(unwrap_model(model), device.type, "fp16" if device.type == "cuda" else "bf16")
        made: Any = prepare_model(model, wrap_ddp=not self.is_alone, ddp_kwargs=ddp_kwargs)
        self.models.append(made)
        if compile:
            made = torch.compile(made, **(compile if isinstance(compile, dict) else {}))
        return made

    def wrap_optimizer(
        self, optimizer: torch.optim.Optimizer, passes: int, averages: bool | None
    ) -> torch.optim.Optimizer:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ArgumentTypeError(
                f"wrap_optimizer() was given a {type(optimizer).__name__}; expected a torch.optim.Optimizer."
            )
        if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
            raise ArgumentError(f"backward_passes_per_step={passes!r}: expected a whole number, at least 1.")
        self._optimizers.append(_Optimizer(optimizer, averages))
        return optimizer

    def wrap_scheduler(self, scheduler: Any, step_mode: Any, frequency: int) -> Any:
        wrapped = scheduler if isinstance(scheduler, LRScheduler) else LRScheduler(scheduler, step_mode, frequency)
        inner = getattr(wrapped.scheduler, "optimizer", None)
        if inner is not None and not any(one is inner for one in self.optimizers):
            raise ArgumentError(
                "wrap_lr_scheduler(): the optimizer of this scheduler is not wrapped. Call wrap_optimizer() before, "
                "and give the scheduler what it returns."
            )
        self.schedulers.append(wrapped)
        return wrapped.scheduler

    def wrap_scaler(self, scaler: Any) -> Any:
        if self.models:
            raise TrainerStateError("wrap_scaler() comes too late: call it before the first wrap_model().")
        if self.scaler is not None:
            raise TrainerStateError("wrap_scaler() was called before: a trial has one scaler.")
        self.scaler = scaler
        return scaler

    def begin_batch(self, batch: int) -> None:
        """Gradients travel at batches at which optimizers step, and not before."""
        was_update, self.is_update = self.is_update, is_update(batch, self.aggregation_frequency)
        if self.is_update != was_update:
            for model in self.models:
                if isinstance(model, DistributedDataParallel):
                    model.require_backward_grad_sync = self.is_update

    def backward(self, loss: torch.Tensor, *args: Any) -> None:
        if self.is_automatic and self.scaler is not None:
            loss = self.scaler.scale(loss)
        with section(self.clock, "backward"):
            loss.backward(*args)  # type: ignore[no-untyped-call]

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        clip_grads: Callable[[Iterable[torch.nn.Parameter]], Any] | None,
        auto_zero_grads: bool,
        scaler: Any,
    ) -> None:
        if not auto_zero_grads and self.aggregation_frequency > 1:
            raise ArgumentError(
                f"step_optimizer(auto_zero_grads=False) with aggregation_frequency={self.aggregation_frequency}: only "
                "the loop knows at which batch gradients may be cleared. Leave it True."
            )
        if not self.is_update:
            return
        one = next((known for known in self._optimizers if known.optimizer is optimizer), None)
        if one is None:
            raise ArgumentError("step_optimizer() was given an optimizer that is not wrapped: see wrap_optimizer().")
        if self.aggregation_frequency > 1 and (self.averages if one.averages is None else one.averages):
            gradients = [parameter.grad for parameter in _parameters(optimizer) if parameter.grad is not None]
            if gradients:
                torch._foreach_div_(gradients, float(self.aggregation_frequency))
        used = scaler if scaler is not None else self.scaler if self.is_automatic else None
        if clip_grads is not None:
            if used is not None:
                used.unscale_(optimizer)
            clip_grads(_parameters(optimizer))
        with section(self.clock, "step"):
            if used is not None:
                used.step(optimizer)
                self._is_scale_used = self.is_automatic
            else:
                optimizer.step()
            if auto_zero_grads:
                optimizer.zero_grad()

    def end_batch(self, moment: Moment) -> None:
        if self._is_scale_used and self.scaler is not None:
            self.scaler.update()
            self._is_scale_used = False
        self._num_ended += moment.is_epoch_end
        moment = replace(moment, num_ended=self._num_ended)
        if self.is_update:
            self._num_ended = 0
        for one in self.schedulers:
            for _ in range(num_steps(one.step_mode, one.frequency, moment, self.aggregation_frequency)):
                one.scheduler.step()

    def check(self) -> None:
        """Before the first batch."""
        if not self.models:
            raise ArgumentError("The trial has no model: call context.wrap_model(model) in its __init__, or before.")
        if not self._optimizers:
            raise ArgumentError("The trial has no optimizer: call context.wrap_optimizer(optimizer).")

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """For a validation: models in evaluation mode, which ranks may call differently often. Collective."""
        with ExitStack() as stack:
            for model in self.models:
                stack.enter_context(each_on_its_own(model))
                stack.callback(model.train, True)
                model.train(False)
            yield

    def gradients(self, num_batches: int) -> list[list[torch.Tensor | None]] | None:
        """This rank's, that wait for further batches after these; None if none do."""
        if num_batches % self.aggregation_frequency == 0:
            return None
        return [[parameter.grad for parameter in _parameters(one)] for one in self.optimizers]

    def restore_gradients(self, ranks: Sequence[list[list[torch.Tensor | None]]]) -> None:
        """Those of this rank; or of all former ranks, if there were not as many: the mean over ranks is what counts."""
        for number, optimizer in enumerate(self.optimizers):
            for place, parameter in enumerate(_parameters(optimizer)):
                there = [rank[number][place] for rank in ranks]
                known = [gradient.to(parameter.device) for gradient in there if gradient is not None]
                parameter.grad = torch.stack(known).sum(0) / len(ranks) if known else None

    def state(self) -> dict[str, Any]:
        made: dict[str, Any] = {
            "models": [unwrap_model(model).state_dict() for model in self.models],
            "optimizers": [one.state_dict() for one in self.optimizers],
            "lr_schedulers": [one.scheduler.state_dict() for one in self.schedulers],
            "epochs_ended": self._num_ended,
        }
        return made if self.scaler is None else {**made, "scaler": self.scaler.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        """By the order in which things were wrapped."""
        self.restore_models(state)
        for name, parts in (
            ("optimizers", self.optimizers),
            ("lr_schedulers", [one.scheduler for one in self.schedulers]),
        ):
            _check_number(name, len(parts), len(state.get(name, ())))
            for part, kept in zip(parts, state.get(name, ()), strict=True):
                part.load_state_dict(kept)
        self._num_ended = int(state.get("epochs_ended", 0))
        if self.scaler is not None and "scaler" in state:
            self.scaler.load_state_dict(state["scaler"])

    def restore_models(self, state: dict[str, Any]) -> None:
        _check_number("models", len(self.models), len(state["models"]))
        for model, kept in zip(self.models, state["models"], strict=True):
            unwrap_model(model).load_state_dict(_without_prefix(kept, unwrap_model(model)))


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _without_prefix(kept: dict[str, Any], model: torch.nn.Module) -> dict[str, Any]:
    """A checkpoint of somebody else's loop may have the names that DDP gives."""
    prefix = "module."
    if (
        kept
        and all(name.startswith(prefix) for name in kept)
        and not all(name.startswith(prefix) for name in model.state_dict())
    ):
        return {name.removeprefix(prefix): value for name, value in kept.items()}
    return kept


def _check_number(name: str, ours: int, theirs: int) -> None:
    if ours != theirs:
        raise ArgumentError(
            f"The checkpoint has {theirs} {name}, and the trial has wrapped {ours}: it belongs to another trial, or "
            "what is wrapped depends on something that has changed."
        )
