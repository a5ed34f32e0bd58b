"""A trial out of a checkpoint: for inference, or to look at it."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from paceline import checkpoints, core
from paceline.errors import ArgumentError
from paceline.pytorch.context import PyTorchTrialContext
from paceline.pytorch.kept import found_in
from paceline.pytorch.trial import PyTorchTrial


def load_trial_from_checkpoint_path(
    path: str | os.PathLike[str],
    trial_class: type[PyTorchTrial] | None = None,
    trial_kwargs: dict[str, Any] | None = None,
    torch_load_kwargs: dict[str, Any] | None = None,
    *,
    hparams: dict[str, Any] | None = None,
    trusted: bool = False,
) -> PyTorchTrial:
    """The trial, made anew with the hyperparameters that it had, with the weights of the checkpoint. It trains nothing.

    Args:
        trial_class: of the trial. Without it, and with `trusted=True`, the class that the checkpoint names is imported:
            reading a checkpoint runs no code unless you say so.
        trial_kwargs: further arguments of its constructor.
        torch_load_kwargs: ignored. Checkpoints are not read by torch.load, and weights come to where the model is.
        hparams: instead of those in the checkpoint.
    """
    checkpoint = checkpoints.load(os.fspath(path))
    found = found_in(checkpoint)
    known = dict(checkpoint.get("trial", {}))
    made_of = trial_class or _named(str(known.get("class", "")), trusted)
    chosen = hparams if hparams is not None else known.get("hparams")
    context = PyTorchTrialContext(_Nowhere(), chosen, None, 1, found.seed)
    context.optimization.is_alone = True  # one rank may look at a trial while the others train
    trial = made_of(context, **(trial_kwargs or {}))  # type: ignore[call-arg]
    context.optimization.restore_models(dict(checkpoint))
    return trial


@dataclass(frozen=True)
class _Nowhere:
    """What a context stands on that no run has."""

    distributed: core.DistributedContext = field(default_factory=core.DistributedContext)
    run_dir: None = None


def _named(name: str, trusted: bool) -> type[PyTorchTrial]:
    module, _, qualname = name.partition(":")
    if not trusted:
        raise ArgumentError(
            f"load_trial_from_checkpoint_path(): the checkpoint is of the class {name!r}. Give it, trial_class=..., or "
            "say trusted=True to have it imported."
        )
    try:
        if module == "__main__" and module not in sys.modules:
            raise ImportError("it was defined in a script")
        found: Any = import_module(module)
        for part in qualname.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ArgumentError(
            f"load_trial_from_checkpoint_path(): the class {name!r} of the checkpoint cannot be imported ({error}). "
            "Give it: trial_class=..."
        ) from error
    if not (isinstance(found, type) and issubclass(found, PyTorchTrial)):
        raise ArgumentError(f"load_trial_from_checkpoint_path(): {name!r} is no PyTorchTrial. Give trial_class=...")
    return found
