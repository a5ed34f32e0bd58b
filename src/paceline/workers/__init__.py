"""Where workers live: the group protocol, its engines, and the worker's own side.

An engine is one module that makes worker groups. It is found by name here and imported only when used.
"""

import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from paceline import registry
from paceline.errors import ArgumentError, ArgumentTypeError, MissingDependencyError
from paceline.workers.base import Engine


def resolve_engine(engine: "str | Engine | None", *, max_workers: float) -> Engine:
    """Turn what the user gave into an engine; zero workers always means inline, and nothing means Ray where it is in
    use."""
    if engine == "inline" and max_workers > 1:
        raise ArgumentError(f"engine='inline' is this process alone, but num_workers={max_workers}: ask for 0 or 1.")
    if max_workers == 0:
        engine = "inline"
    elif engine is None:
        engine = "ray" if ray_is_in_use() else "local"
    names = ", ".join(registry.names("engine"))
    if not isinstance(engine, str):
        if not isinstance(engine, Engine):
            raise ArgumentTypeError(
                f"engine is {engine!r} of type {type(engine).__name__}; expected a name "
                f"({names}) or an engine object such as LocalEngine()."
            )
        return engine
    if engine not in registry.names("engine"):
        raise ArgumentError(f"engine={engine!r} is not known; the engines are {names}.")
    if engine == "ray" and find_spec("ray") is None:
        raise MissingDependencyError("ray", "ray", "engine='ray'")
    made: Engine = registry.find("engine", engine)()
    return made


def ray_is_in_use(environ: Mapping[str, str] = os.environ, modules: Mapping[str, Any] = sys.modules) -> bool:
    """Whether this process is connected to a Ray cluster, or its environment names one on which it can have workers."""
    address, ray = environ.get("RAY_ADDRESS", ""), modules.get("ray")
    is_named = bool(address) and not takes_jobs_only(address)
    return is_named or (ray is not None and bool(ray.is_initialized()))


def takes_jobs_only(address: str) -> bool:
    """Whether it is that of a cluster's job server, as `train launch` takes it: no workers can be had from there."""
    return address.startswith(("http://", "https://"))
