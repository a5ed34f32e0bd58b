"""Loss scaling, which float16 needs: small gradients would vanish in it."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from paceline.errors import ArgumentTypeError, TrainerStateError
from paceline.prepare.scope import Scope, current_scope


def prepare_optimizer(optimizer: Optimizer) -> Optimizer:
    """The optimizer itself; with float16, one whose step takes the loss scale out of the gradients."""
    if not isinstance(optimizer, Optimizer):
        raise ArgumentTypeError(
            f"prepare_optimizer was given {optimizer!r} of type {type(optimizer).__name__}; "
            "expected a torch.optim.Optimizer."
        )
    scope = current_scope()
    scope.num_optimizers += 1
    if scope.scaler is None or isinstance(optimizer, ScaledOptimizer):
        return optimizer
    return ScaledOptimizer(optimizer, scope.scaler, scope)


def backward(loss: torch.Tensor) -> None:
    """`loss.backward()`; with float16, of the scaled loss."""
    scope = current_scope()
    if scope.scaler is None:
        loss.backward()  # type: ignore[no-untyped-call]
        return
    if not scope.num_optimizers:
        raise TrainerStateError(
            "backward scales the loss for float16, but no optimizer was prepared to take the scale out of "
            "the gradients again. Use the optimizer that prepare_optimizer or accelerate returns."
        )
    update_scale(scope)
    scope.is_scaled = True
    scope.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]


def update_scale(scope: Scope) -> None:
    """Let the scale follow the last step.

    Put off until it is needed again: all optimizers that share a backward must step with the same scale.
    """
    if scope.is_update_due and scope.scaler is not None:
        scope.scaler.update()
        scope.is_update_due = False


class ScaledOptimizer(Optimizer):
    """An optimizer whose step goes through a GradScaler, which leaves a step out when gradients overflowed.

    It is an Optimizer for learning-rate schedulers, and everything but the step is the given optimizer's own.
    Its state holds the scale as well; a plain optimizer that loads that state ignores the scale.
    """

    def __init__(self, optimizer: Optimizer, scaler: torch.amp.GradScaler, scope: Scope):
        # Optimizer.__init__ is not called: the groups, state and hooks are those of the optimizer inside.
        self.optimizer, self._scaler, self._scope = optimizer, scaler, scope

    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            raise ArgumentTypeError(
                "step was given a closure, which loss scaling cannot repeat. Call backward(loss) and then "
                "step(), or use mixed_precision='bf16', which needs no scaling."
            )
        if not self._scope.is_scaled:
            raise TrainerStateError(
                "step found gradients without a loss scale. With float16, call paceline.backward(loss) "
                "instead of loss.backward()."
            )
        result = self._scaler.step(self.optimizer)
        self._scope.is_update_due = True
        return result

    def unscale(self) -> None:
        """Take the scale out of the gradients now: before they are clipped or read, once a step."""
        self._scaler.unscale_(self.optimizer)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        self.optimizer.zero_grad(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        update_scale(self._scope)
        return {**self.optimizer.state_dict(), "grad_scaler": self._scaler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = dict(state_dict)
        scale = state.pop("grad_scaler", None)
        self.optimizer.load_state_dict(state)
        if scale:
            self._scaler.load_state_dict(scale)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not set yet: a copy is being made
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"
