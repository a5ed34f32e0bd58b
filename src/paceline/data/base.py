"""What a run needs of its dataset, whatever it is made of."""

from collections.abc import Sequence
from typing import Any, Protocol

from paceline.workers.base import WorkerInfo


class Source(Protocol):
    """Data that is cut anew for every attempt: an elastic group may have another size each time."""

    engine: str
    """The engine whose workers can read the shards."""

    def cut(self, workers: Sequence[WorkerInfo]) -> Sequence[Any]:
        """A shard for each worker, by rank, which is sent there. Ends the former ones."""
        ...

    def close(self) -> None:
        """End the shards: who is reading one gets an error. Idempotent."""
        ...

    def describe(self) -> Any:
        """For the run folder."""
        ...
