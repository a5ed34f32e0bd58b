"""What `save_checkpoint` and `load_checkpoint` do on a given rank: rank 0 writes, the others follow, and with
`num_to_keep=0` everybody keeps the state in memory."""

import contextlib
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from paceline.checkpoints.content.snapshot import copy_of
from paceline.checkpoints.store import Checkpoint, CheckpointStore, load
from paceline.checkpoints.strategy import CheckpointStrategy
from paceline.checkpoints.writer import CheckpointWriter
from paceline.errors import ArgumentError, CheckpointNotFoundError

FOLLOW_TIMEOUT_S = 120.0


class Saver(Protocol):
    def save(self, state: dict[str, Any], directory: str | Path | None, iteration: int) -> None: ...

    def load(self) -> Checkpoint | None: ...

    def close(self) -> None:
        """Block until what was saved is safe; raises what went wrong with it."""

    def abandon(self) -> None:
        """Block until nothing is being written any more, however that ends."""


class WritingSaver:
    """Rank 0. `send` tells the driver: "saving", then "committed" or "save_failed"."""

    def __init__(
        self,
        resume_from: str | dict[str, Any] | None,
        store: CheckpointStore,
        strategy: CheckpointStrategy,
        first_id: int,
        send: Callable[[str, Any], None],
        before_commit: Callable[[], None] = lambda: None,
        load: Callable[[str], Checkpoint] = load,
    ):
        self._resume_from, self._store, self._send, self._load = resume_from, store, send, load
        self._writer = CheckpointWriter(
            store,
            strategy,
            first_id,
            partial(send, "committed"),
            before_commit=before_commit,
            on_failure=partial(send, "save_failed"),
            spare_id=first_id - 1,
        )
        self._latest_id: int | None = None

    def save(self, state: dict[str, Any], directory: str | Path | None, iteration: int) -> None:
        self._send("saving", None)
        try:
            self._latest_id = self._writer.save(state, directory=directory, iteration=iteration)
        except BaseException as error:
            self._send("save_failed", str(error))
            raise

    def load(self) -> Checkpoint | None:
        if self._latest_id is None:
            return _initial(self._resume_from, self._load)
        self._writer.flush()
        return self._load(self._store.path_of(self._latest_id))

    def close(self) -> None:
        self._writer.close()

    def abandon(self) -> None:
        with contextlib.suppress(Exception):
            self._writer.close()


class FollowingSaver:
    """Any other rank: its n-th save stands for rank 0's n-th. `flush` makes sure that what this rank has reported so
    far survives it, for nobody will report it again once rank 0's checkpoint counts."""

    def __init__(
        self,
        resume_from: str | dict[str, Any] | None,
        store: CheckpointStore,
        first_id: int,
        flush: Callable[[], None] = lambda: None,
        load: Callable[[str], Checkpoint] = load,
    ):
        self._resume_from, self._store, self._flush, self._load = resume_from, store, flush, load
        self._next_id = self._first_id = first_id

    def save(self, state: dict[str, Any], directory: str | Path | None, iteration: int) -> None:
        self._flush()
        self._next_id += 1

    def load(self) -> Checkpoint | None:
        """Blocks until rank 0 has committed what this rank has saved, or something newer; rank 0 needs nothing
        from us to get there."""
        wanted = self._next_id - 1
        if wanted < self._first_id:
            return _initial(self._resume_from, self._load)
        deadline, pause_s = time.monotonic() + FOLLOW_TIMEOUT_S, 0.005
        while (latest := self._store.latest()) is None or latest.id < wanted:
            if time.monotonic() > deadline:
                raise CheckpointNotFoundError(
                    f"Rank 0 has not saved {self._store.path_of(wanted)} within {FOLLOW_TIMEOUT_S:g} s, although "
                    "this rank has called save_checkpoint() as often. Call it equally often on all ranks, or on "
                    "rank 0 alone."
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.5)  # a listing may go to an object store
        return self._load(latest.path)

    def close(self) -> None:
        pass

    abandon = close


class MemorySaver:
    """Any rank when nothing goes to disk. `on_save` hands rank 0's state to the driver, which needs it to recover."""

    def __init__(
        self,
        resume_from: str | dict[str, Any] | None,
        on_save: Callable[[tuple[dict[str, Any], int]], None] | None,
        load: Callable[[str], Checkpoint] = load,
    ):
        self._latest: dict[str, Any] | None = None
        self._resume_from, self._on_save, self._load = resume_from, on_save, load

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
        if self._latest is None:
            return _initial(self._resume_from, self._load)
        return Checkpoint(copy_of(self._latest))

    def close(self) -> None:
        pass

    abandon = close


def _initial(resume_from: str | dict[str, Any] | None, load: Callable[[str], Checkpoint]) -> Checkpoint | None:
    if resume_from is None:
        return None
    return load(resume_from) if isinstance(resume_from, str) else Checkpoint(resume_from)
