"""The seam to a framework: what a backend is asked, when, and on which side.

driver    check()              before any worker exists: is the framework installed?
driver    join(call, use_gpu)  once the workers of a group exist; how each leaves it again goes to its `wire.leaving`
worker    intact()             after each run: could the next run use this group?
driver    is_broken_collective(error)   is this exception only the echo of another rank's end?
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar, Protocol

from paceline.errors import MissingDependencyError
from paceline.workers.base import Preload, Raised


class Caller(Protocol):
    """Runs `fn(wire, *args)` on workers and waits: `one` on a rank, `all` on every rank."""

    def one(self, rank: int, fn: Callable[..., Any], *args: Any) -> Any: ...

    def all(self, fn: Callable[..., Any], *args: Any) -> list[Any]: ...


@dataclass(frozen=True, kw_only=True)
class BackendConfig:
    """Workers that form no group: each runs on its own. Frameworks are subclasses."""

    name: ClassVar[str] = "none"
    package: ClassVar[str | None] = None
    preload: ClassVar[Preload] = Preload()
    transports: ClassVar[tuple[str, ...]] = ()
    """What its own `backend=` may be. Somebody may take one of them for the name of a backend."""
    sees_all_gpus: ClassVar[bool] = False
    """Whether workers without GPUs of their own see all of the machine, for a script that chooses among them itself.
    Else they see none: frameworks would take what they find, in every worker."""

    def check(self) -> None:
        if self.package is not None and find_spec(self.package) is None:
            raise MissingDependencyError(self.package, self.name, f"backend={self.name!r}")

    def join(self, call: Caller, *, use_gpu: bool) -> None:
        """Make one group of the workers. Every process is new, or has left its former group."""

    def intact(self) -> bool:
        """In a worker, after a run: whether the user's function left the group as it was."""
        return True

    def num_collectives(self) -> int | None:
        """In a worker: in how many collectives of the whole group it has taken part, if that can be known."""
        return None

    def is_broken_collective(self, error: Raised) -> bool:
        """Whether the exception may only say that another rank is gone. Then the other rank's fate decides. What the
        collectives of `core` raise, which trials are made of, is such on every backend."""
        return error.type_name == "WorkersLostError"
