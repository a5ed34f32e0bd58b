"""How workers become one group. A backend is one module; it is found by name here and imported only when used."""

from importlib import import_module

from paceline.backends.base import BackendConfig
from paceline.errors import ArgumentError, ArgumentTypeError

BACKENDS = {"torch": "paceline.backends.torch:TorchConfig"}

__all__ = ["BACKENDS", "BackendConfig", "resolve_backend"]


def resolve_backend(backend: str | BackendConfig) -> BackendConfig:
    if isinstance(backend, BackendConfig):
        return backend
    names = ", ".join(repr(name) for name in sorted(BACKENDS))
    if not isinstance(backend, str):
        hint = " Did you mean to call it?" if isinstance(backend, type) else ""
        raise ArgumentTypeError(
            f"backend is {backend!r} of type {type(backend).__name__}; expected a name ({names}) or a config object "
            f"such as TorchConfig().{hint}"
        )
    if backend not in BACKENDS:
        raise ArgumentError(f"backend={backend!r} is not supported; the backends are {names}.")
    module, _, name = BACKENDS[backend].partition(":")
    made: BackendConfig = getattr(import_module(module), name)()
    return made
