"""What the helpers of one run share: the worker's place, the precision in force, the seed.

It lives on the session, so a second run on a warm worker starts with none of it; outside a worker there is
one for the process. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from paceline import session
from paceline.workers.base import Place

if TYPE_CHECKING:
    import torch

    from paceline.prepare.order import Progress

Precision = Literal["bf16", "fp16"]

_KEY = "prepare"
_outside: dict[str, Any] = {}


@dataclass
class Scope:
    """`accelerate` sets `precision` and `scaler`, `enable_reproducibility` sets `seed`, a prepared loader `progress` at
    each batch; the rest is notes."""

    precision: Precision | None = None
    scaler: torch.amp.GradScaler | None = None
    seed: int | None = None
    progress: Progress | None = None
    num_models: int = 0
    num_optimizers: int = 0
    is_scaled: bool = False  # a loss went backward through the scaler, so the gradients carry its scale
    is_update_due: bool = False
    notices: set[str] = field(default_factory=set)
    undo: list[Callable[[], None]] = field(default_factory=list)


def current_scope() -> Scope:
    running = session.current()
    extras = _outside if running is None else running.extras
    if _KEY not in extras:
        extras[_KEY] = Scope()
        if running is not None:
            running.cleanups.callback(close_scope, extras)
    scope: Scope = extras[_KEY]
    return scope


def current_place() -> Place:
    """Where this process stands. A call of `Trainer.execute` has a place, though it has no session, and so has a script
    that a launcher has started."""
    return session.place()


def close_scope(extras: dict[str, Any] | None = None) -> None:
    """Forget a run's scope and turn back what it switched in the process, such as deterministic algorithms.

    Idempotent. `extras` is the session's; without it, the scope of code that runs outside a worker is closed.
    """
    scope: Scope | None = (_outside if extras is None else extras).pop(_KEY, None)
    while scope is not None and scope.undo:
        scope.undo.pop()()
