"""What `save_checkpoint` and `load_checkpoint` do on a given rank: rank 0 writes, the others follow, and with
`num_to_keep=0` everybody keeps the state in memory."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from paceline.checkpoints.format import copy_of
from paceline.checkpoints.store import Checkpoint, CheckpointStore, load
from paceline.checkpoints.writer import CheckpointWriter
from paceline.errors import ArgumentError, CheckpointNotFoundError

_POLL_S = 0.01
_FOLLOW_TIMEOUT_S = 120.0


class Saver(Protocol):
    def save(self, state: dict[str, Any], directory: str | Path | None, iteration: int) -> None: ...

    def load(self) -> Checkpoint | None: ...

    def close(self) -> None:
        """Block until what was saved is safe; raises what went wrong with it."""


class WritingSaver:
    """Rank 0."""

    def __init__(
        self, resume_from: str | dict[str, Any] | None, store: CheckpointStore, writer: CheckpointWriter
    ):
        self._resume_from, self._store, self._writer = resume_from, store, writer
        self._latest_id: int | None = None

    def save(self, state: dict[str, Any], directory: str | Path | None, iteration: int) -> None:
        self._latest_id = self._writer.save(state, directory=directory, iteration=iteration)

    def load(self) -> Checkpoint | None:
        if self._latest_id is None:
            return _initial(self._resume_from)
        self._writer.flush()
        return load(self._store.path_of(self._latest_id))

    def close(self) -> None:
        self._writer.close()


class FollowingSaver:
    """Any other rank: its n-th save stands for rank 0's n-th."""

    def __init__(self, resume_from: str | dict[str, Any] | None, store: CheckpointStore, first_id: int):
        self._resume_from, self._store = resume_from, store
        self._next_id = self._first_id = first_id

    def save(self, state: dict[str, Any], directory: str | Path | None, iteration: int) -> None:
        self._next_id += 1

    def load(self) -> Checkpoint | None:
        """Blocks until rank 0 has committed what this rank has saved; rank 0 needs nothing from us to get there."""
        if self._next_id == self._first_id:
            return _initial(self._resume_from)
        path = self._store.path_of(self._next_id - 1)
        deadline = time.monotonic() + _FOLLOW_TIMEOUT_S
        while True:
            try:
                return load(path)
            except CheckpointNotFoundError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(_POLL_S)

    def close(self) -> None:
        pass


class MemorySaver:
    """Any rank when nothing goes to disk. `on_save` hands rank 0's state to the driver, which needs it for recovery."""

    def __init__(
        self,
        resume_from: str | dict[str, Any] | None,
        on_save: Callable[[tuple[dict[str, Any], int]], None] | None,
    ):
        self._latest: dict[str, Any] | None = None
        self._resume_from, self._on_save = resume_from, on_save

    def save(self, state: dict[str, Any], directory: str | Path | None, iteration: int) -> None:
        if directory is not None:
            raise ArgumentError(
                f"save_checkpoint({str(directory)!r}): a directory cannot be kept in memory; "
                "use a CheckpointStrategy whose num_to_keep is not 0."
            )
        self._latest = copy_of(state)
        if self._on_save is not None:
            self._on_save((self._latest, iteration))

    def load(self) -> Checkpoint | None:
        return _initial(self._resume_from) if self._latest is None else Checkpoint(copy_of(self._latest))

    def close(self) -> None:
        pass


def _initial(resume_from: str | dict[str, Any] | None) -> Checkpoint | None:
    if resume_from is None:
        return None
    return load(resume_from) if isinstance(resume_from, str) else Checkpoint(resume_from)
