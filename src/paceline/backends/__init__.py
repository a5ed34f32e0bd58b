"""How workers become one group. A backend is one module; it is found by name here and imported only when used."""

from paceline import registry
from paceline.backends.base import BackendConfig
from paceline.errors import ArgumentError, ArgumentTypeError

__all__ = ["BackendConfig", "resolve_backend"]


def resolve_backend(backend: str | BackendConfig) -> BackendConfig:
    if isinstance(backend, BackendConfig):
        return backend
    names = ", ".join(repr(name) for name in registry.names("backend"))
    if not isinstance(backend, str):
        hint = " Did you mean to call it?" if isinstance(backend, type) else ""
        raise ArgumentTypeError(
            f"backend is {backend!r} of type {type(backend).__name__}; expected a name ({names}) or a config object "
            f"such as TorchConfig().{hint}"
        )
    if backend not in registry.names("backend"):
        raise ArgumentError(f"backend={backend!r} is not supported; the backends are {names}.")
    made: BackendConfig = registry.find("backend", backend)()
    return made
