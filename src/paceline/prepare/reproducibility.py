"""The same run twice, and the same run after an interruption."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from paceline import session
from paceline.errors import ArgumentError
from paceline.prepare.device import get_device
from paceline.prepare.rng import check_seed, generator_states, restore_generators, seed_generators
from paceline.prepare.scope import current_scope

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_ALWAYS_THERE = {"python", "numpy", "torch"}
"""In every state, since this package imports them; of other frameworks, those that were imported."""


def enable_reproducibility(seed: int = 0) -> None:
    """Seed python, numpy and torch and allow only deterministic algorithms; call it first, on every rank.

    All ranks get the same seed, so that models start equal. Loaders prepared afterwards take their order and
    the seeds of their worker processes from it. The run folder records the seed. From now on every checkpoint keeps
    the random generators of each rank, and `load_checkpoint()` puts them back in a function that begins with one.
    """
    check_seed(seed)
    scope = current_scope()
    if scope.seed is None:
        _remember_switches(scope.undo)
    scope.seed = seed
    seed_generators(seed)
    torch.manual_seed(seed)  # every CUDA device, too
    os.environ.setdefault(_CUBLAS, ":4096:8")  # cuBLAS is deterministic only with a fixed workspace
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    running = session.current()
    if running is not None:
        running.seed = seed
        running.note("seed", seed=seed)
        running.keep(_Generators(seed))


@dataclass(frozen=True)
class _Generators:
    """The random generators of a rank, kept with every checkpoint. With another seed the function wants other numbers,
    and with another number of ranks none of the kept ones is this rank's: then they stay as seeded."""

    seed: int
    name: str = "rng"

    def state(self) -> dict[str, Any]:
        return {"seed": self.seed, **rng_state()}

    def restore(self, own: dict[str, Any] | None, everybody: Callable[[], list[Any]]) -> None:
        if own is not None and own["seed"] == self.seed:
            set_rng_state(own)


def rng_state() -> dict[str, Any]:
    """The generators of python, numpy and torch as plain values for a checkpoint; those of this rank only."""
    states = generator_states()
    device = get_device()
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_rng_state(state: dict[str, Any] | None = None) -> None:
    """Put back what `rng_state` returned; on a CPU, a GPU's part of it is left out.

    Without a state: what the checkpoint has of this rank that the function began with, if it has. `load_checkpoint()`
    does that by itself; repeat it when something has drawn random numbers since, a new model for instance.
    """
    if state is None:
        running = session.current()
        state = None if running is None else running.kept("rng")
        if state is None:
            return
    missing = _ALWAYS_THERE - set(state)
    if missing:
        raise ArgumentError(f"this state lacks {', '.join(sorted(missing))}; expected what rng_state() returned.")
    restore_generators(state)
    device = get_device()
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def _remember_switches(undo: list[Callable[[], None]]) -> None:
    """For a worker that is used again: these switches are the process's, not the run's."""
    mode = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark, had_cublas = torch.backends.cudnn.benchmark, _CUBLAS in os.environ

    def turn_back() -> None:
        torch.use_deterministic_algorithms(mode, warn_only=warn_only)
        torch.backends.cudnn.benchmark = benchmark
        if not had_cublas:
            os.environ.pop(_CUBLAS, None)

    undo.append(turn_back)
