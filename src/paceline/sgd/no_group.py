"""Workers that form no process group: for the strategies that need none. What a worker is told of them is here, apart
from the driver's side."""

from dataclasses import dataclass, field

from paceline.backends.base import BackendConfig, Caller
from paceline.backends.torch import use_own_threads
from paceline.workers.base import Preload


@dataclass(frozen=True, kw_only=True)
class NoGroup(BackendConfig):
    """Workers that exchange nothing with each other. They have torch, if the driver does: then their models need it."""

    preload: Preload = field(default_factory=Preload)  # type: ignore[misc]

    def join(self, call: Caller, *, use_gpu: bool) -> None:
        """A nursery that has torch loaded has read its number of threads before a worker's share was known."""
        if "torch" in self.preload.to_join:
            call.all(use_own_threads)
