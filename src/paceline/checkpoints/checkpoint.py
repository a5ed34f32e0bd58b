"""What a checkpoint is to its users: a dict they get back, and a line about it in a listing."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

PER_RANK = "per_rank"


class Checkpoint(dict[str, Any]):
    """The values that were given to `save_checkpoint`, by name. It is a dict, and prints as one.

    `path` is where it was loaded from (None: it was never on disk). `directory` holds the user's own files,
    if it was saved with any. For a local checkpoint that is the checkpoint's own folder: read there, copy
    before changing anything. For a remote one it is a download that is removed when this process ends.
    """

    def __init__(self, state: Mapping[str, Any] = {}, *, path: str | None = None, directory: Path | None = None):
        super().__init__(state)
        self.path = path
        self.directory = directory
        self._parts: Parts | None = None
        self._own: dict[str, Any] | None = None

    def __bool__(self) -> bool:
        """One that was saved is there, also if all it has is in `per_rank`: `if checkpoint` asks for that."""
        return len(self) > 0 or self._parts is not None

    def attach(self, parts: "Parts", rank: int | None) -> None:
        """Give it what the ranks have of their own; `rank` is who loads it, if that is one of them."""
        self._parts = parts
        self._own = None if rank is None else parts.read(rank)

    @property
    def per_rank(self) -> dict[str, Any] | None:
        """What this rank gave as `per_rank` when it was saved; None where there is no such thing: the number of workers
        has changed, the rank saved nothing of its own, or this is not a worker."""
        return None if self._own is None else self._own.get(PER_RANK)

    @property
    def all_ranks(self) -> list[dict[str, Any] | None]:
        """What every rank gave as `per_rank`, by the rank it had then. Read from the checkpoint when asked for:
        one that was saved just now is waited for, until all ranks have saved it."""
        return [None if part is None else part.get(PER_RANK) for part in self.parts()]

    def parts(self) -> list[dict[str, Any] | None]:
        """All that each rank had of its own, by the rank it had then: `per_rank`, and what Paceline keeps for it."""
        return [] if self._parts is None else [self._parts.read(rank) for rank in range(self._parts.world_size)]

    def own_part(self) -> dict[str, Any] | None:
        """The same of this rank alone."""
        return self._own

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_parts": None}  # they are read where the checkpoint was opened


class Parts(Protocol):
    """Each rank's own part of one checkpoint, as far as there are any."""

    @property
    def world_size(self) -> int: ...

    def read(self, rank: int) -> dict[str, Any] | None: ...


@dataclass(frozen=True)
class CheckpointInfo:
    """A committed checkpoint, without its content.

    `score` is the value of the strategy's score attribute when it was saved, None when ranked by time alone.
    `iteration` is the number of reports before it, `time` when it was saved (seconds since the epoch), `world_size` the
    number of ranks that there were, `ranks` those that have a part in it.
    """

    id: int
    path: str
    score: float | None
    iteration: int
    time: float
    num_bytes: int
    world_size: int = 1
    ranks: tuple[int, ...] = (0,)
