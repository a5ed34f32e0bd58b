"""What the suites for backends have to know of each: a module `probe_<name>.py` with a `PROBE` for every one. It is
imported when tests are collected, and so imports its framework only inside of its functions.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np

from paceline import BackendConfig, registry

LR, MOMENTUM = 0.1, 0.9


@dataclass(frozen=True)
class Probe:
    """All but `config` run in a worker.

    `place`: its rank and size as the group has them, None if it is in none. `meet`: the sum of rank + 1, for which
    every rank has to come. `spoil`: makes the group unusable for the next run. `rejoins`: whether a process that has
    left its group can join another. `serves_many`: whether a group in which ranks have met serves another run.

    `train(config)`: fits a linear model to `rows()` by descent with momentum, rank r of n with the rows r::n, each step
    by the gradient of the mean loss over all rows. It begins from `load_checkpoint()`, and ends with the step
    `config["steps"]`. In each step it reports `step` and `loss` and saves a checkpoint, then calls
    `config["hook"](step)`. It returns the weights as a list.
    """

    config: Callable[[], BackendConfig]
    place: Callable[[], tuple[int, int] | None] = lambda: None
    meet: Callable[[], Any] | None = None
    spoil: Callable[[], Any] | None = None
    rejoins: bool = True
    serves_many: bool = True
    train: Callable[[dict[str, Any]], list[float]] | None = None


def installed_backends() -> list[str]:
    """Those of the registry whose framework is here, and none at all."""
    classes = {name: registry.find("backend", name) for name in registry.names("backend")}
    return ["none", *(name for name, cls in classes.items() if cls.package is None or find_spec(cls.package))]


def probe_of(name: str) -> Probe:
    if name == "none":
        return Probe(BackendConfig)
    assert find_spec(f"probe_{name}"), f"the backend {name!r} has no probe: add probe_{name}.py beside {__file__}"
    found: Probe = importlib.import_module(f"probe_{name}").PROBE
    return found


def rows() -> tuple[np.ndarray, np.ndarray]:
    """Eight of them, with three numbers each, and what they are to become. The weights that fit are 1, -2 and 3."""
    x = np.random.default_rng(0).normal(size=(8, 3)).astype("f4")
    return x, x @ np.array([1, -2, 3], dtype="f4")


def fitted(num_steps: int) -> tuple[list[float], np.ndarray]:
    """The losses and the weights that one process gets, all by hand."""
    x, y = rows()
    weights, velocity, losses = np.zeros(3), np.zeros(3), []
    for _ in range(num_steps):
        error = x @ weights - y
        losses.append(float((error**2).mean()))
        velocity = MOMENTUM * velocity + 2 * x.T @ error / len(x)
        weights = weights - LR * velocity
    return losses, weights
