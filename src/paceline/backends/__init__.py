"""How workers become one group. A backend is one module; it is found by name here and imported only when used."""

from paceline import registry
from paceline.backends.base import BackendConfig
from paceline.errors import ArgumentError, ArgumentTypeError

__all__ = ["BackendConfig", "resolve_backend"]


def resolve_backend(backend: str | BackendConfig) -> BackendConfig:
    if isinstance(backend, BackendConfig):
        if hasattr(backend, "backend_cls"):
            raise ArgumentTypeError(
                f"{type(backend).__qualname__} has a backend_cls, as in Ray Train 1.x: nobody would call that class. "
                "Put what its on_start does into a method join(self, call, *, use_gpu) of the config itself, and what "
                "on_shutdown does into the workers' wire.leaving."
            )
        return backend
    names = ", ".join(repr(name) for name in registry.names("backend"))
    if not isinstance(backend, str):
        hint = " Did you mean to call it?" if isinstance(backend, type) else ""
        raise ArgumentTypeError(
            f"backend is {backend!r} of type {type(backend).__name__}; expected a name ({names}) or a config object "
            f"such as TorchConfig().{hint}"
        )
    if backend not in registry.names("backend"):
        raise ArgumentError(f"backend={backend!r} is not supported; the backends are {names}.{_meant(backend)}")
    made: BackendConfig = registry.find("backend", backend)()
    return made


def _meant(backend: str) -> str:
    for kind in (registry.find("backend", name) for name in registry.names("backend")):
        if backend in kind.transports:
            return f" For {backend} say backend={kind.__name__}(backend={backend!r})."
    return ""
