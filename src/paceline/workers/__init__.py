"""Where workers live: the group protocol, its engines, and the worker's own side.

An engine is one module that makes worker groups. It is found by name here and imported only when used.
"""

from importlib import import_module

from paceline.errors import ArgumentError, ArgumentTypeError
from paceline.workers.base import Engine

ENGINES = {
    "inline": "paceline.workers.inline:InlineEngine",
    "local": "paceline.workers.local:LocalEngine",
    "ray": "paceline.workers.ray:RayEngine",
}


def resolve_engine(engine: "str | Engine | None", *, num_workers: int) -> Engine:
    """Turn what the user gave into an engine; zero workers always means inline."""
    if engine == "inline" and num_workers > 1:
        raise ArgumentError(f"engine='inline' is this process alone, but num_workers={num_workers}: ask for 0 or 1.")
    if num_workers == 0:
        engine = "inline"
    elif engine is None:
        engine = "local"
    if not isinstance(engine, str):
        if not isinstance(engine, Engine):
            raise ArgumentTypeError(
                f"engine is {engine!r} of type {type(engine).__name__}; expected a name "
                f"({', '.join(sorted(ENGINES))}) or an engine object such as LocalEngine()."
            )
        return engine
    if engine not in ENGINES:
        raise ArgumentError(f"engine={engine!r} is not known; the engines are {', '.join(sorted(ENGINES))}.")
    module, _, name = ENGINES[engine].partition(":")
    made: Engine = getattr(import_module(module), name)()
    return made
