"""Hooks of a trial: what a `PyTorchCallback` may override, and how the loop calls them all."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import ArgumentTypeError

logger = logging.getLogger(__name__)


class PyTorchCallback:
    """Override what you need. Every hook is called on every rank, unless it says otherwise."""

    def on_trial_startup(self, first_batch_idx: int, checkpoint_uuid: str | None) -> None:
        """Before everything, loaders too. `first_batch_idx` is above 0 when training goes on; the checkpoint may also
        be one that only the weights are taken from."""

    def on_trial_shutdown(self) -> None:
        """When the loop is left, in whatever way but a kill."""

    def on_training_start(self) -> None:
        """Everything is restored, and the first batch comes next. Once in each process."""

    def on_training_epoch_start(self, epoch_idx: int) -> None:
        """Before the first batch of an epoch; not in the middle of one that is continued."""

    def on_training_epoch_end(self, epoch_idx: int) -> None:
        """Right after the last batch of an epoch, before its metrics are reported."""

    def on_training_workload_end(self, avg_metrics: dict[str, Any], batch_metrics: list[dict[str, Any]]) -> None:
        """Whenever a period is due, after the metrics since the last time were reported, and before validation and
        checkpoints."""

    def on_validation_start(self) -> None:
        """The models are in evaluation mode, and the first batch comes next."""

    def on_validation_epoch_start(self) -> None:
        """Before the batches; with `evaluate_batch` only."""

    def on_validation_epoch_end(self, outputs: list[dict[str, Any]]) -> None:
        """After the batches, with what `evaluate_batch` has returned for each of this rank's."""

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        """The metrics over all ranks, before they are reported."""

    def on_checkpoint_load_start(self, checkpoint: dict[str, Any]) -> None:
        """Before it is applied: it may be changed."""

    def on_checkpoint_save_start(self, checkpoint: dict[str, Any]) -> None:
        """Before it is saved, on rank 0: it may be changed and added to."""

    def on_checkpoint_write_end(self, checkpoint_dir: Path) -> None:
        """Rank 0's part is handed over; what is in this directory now is saved with it. On rank 0."""

    def on_checkpoint_upload_end(self, uuid: str) -> None:
        """It is there, under that name: its path. Training waits for that if somebody overrides this."""

    def state_dict(self) -> dict[str, Any]:
        """What to keep with every checkpoint."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What was kept, when training goes on."""


class Callbacks:
    """Those of a trial, by name, in the order in which it gave them."""

    def __init__(self, given: Any):
        if not isinstance(given, Mapping):
            raise ArgumentTypeError(
                f"build_callbacks() returned a {type(given).__name__}; expected a dict of PyTorchCallback by name."
            )
        for name, one in given.items():
            if not isinstance(one, PyTorchCallback):
                raise ArgumentTypeError(
                    f"build_callbacks(): {name!r} is a {type(one).__name__}; expected a pytorch.PyTorchCallback."
                )
        self._by_name: dict[str, PyTorchCallback] = dict(given)
        self._listeners = {
            hook: [one for one in self._by_name.values() if _overrides(one, hook)]
            for hook in vars(PyTorchCallback)
            if hook.startswith("on_")
        }

    def __iter__(self) -> Any:
        return iter(self._by_name.values())

    def listens(self, hook: str) -> bool:
        return bool(self._listeners[hook])

    def tell(self, hook: str, *args: Any) -> None:
        for one in self._listeners[hook]:
            getattr(one, hook)(*_accepted(one, hook, args))

    def state(self) -> dict[str, Any]:
        return {name: one.state_dict() for name, one in self._by_name.items()}

    def restore(self, states: Mapping[str, Any]) -> None:
        for name, one in self._by_name.items():
            if name in states:
                one.load_state_dict(states[name])
            elif _overrides(one, "load_state_dict"):
                logger.warning("The checkpoint has no state of the callback %r: it begins anew.", name)


def _overrides(callback: PyTorchCallback, hook: str) -> bool:
    return getattr(type(callback), hook) is not getattr(PyTorchCallback, hook) or hook in vars(callback)


def _accepted(callback: PyTorchCallback, hook: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """An epoch hook without arguments is an older form of it."""
    if hook != "on_training_epoch_start" or inspect.signature(getattr(callback, hook)).parameters:
        return args
    return ()
