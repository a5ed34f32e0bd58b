"""What `save_checkpoint` and `load_checkpoint` do on a rank."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

from paceline.checkpoints.checkpoint import Checkpoint, Parts
from paceline.checkpoints.part import CommittedFound, DraftFound, Found
from paceline.checkpoints.reading import load_draft, load_through, open_parts
from paceline.checkpoints.storage.base import Storage
from paceline.checkpoints.storage.workspace import Workspace
from paceline.checkpoints.store import CheckpointStore, name_of
from paceline.checkpoints.strategy import CheckpointStrategy
from paceline.checkpoints.writer import Content, PartWriter
from paceline.errors import CheckpointError, CheckpointNotFoundError, CheckpointWriteError

LOAD_TIMEOUT_S = 120.0
_RETRY_S = 0.01
_LOOK_S = 0.1
"""How often to ask whether a checkpoint is whole."""


class Driver(Protocol):
    """The ears of who commits. What is sent arrives after the reports that were made before it."""

    def send(self, kind: str, value: Any) -> None: ...

    def ask(self, topic: str, value: Any, timeout_s: float | None = None) -> Any: ...

    def flush(self) -> None: ...


@dataclass(frozen=True)
class Start:
    """Where an attempt begins, and where it saves."""

    checkpoint: str | dict[str, Any] | None
    """What `load_checkpoint` gives at first."""
    iteration: int
    first_id: int
    root: str
    token: str


class Saver:
    """One rank of one attempt: its n-th save is its part of the n-th checkpoint. Threads may share it: they wait for
    each other.

    The driver is told "saving" when a part is being written, "writing" when more of a large one was, and "part" or
    "save_failed" when it is done.
    """

    def __init__(
        self,
        start: Start,
        strategy: CheckpointStrategy,
        rank: int,
        world_size: int,
        driver: Driver,
        opener: Callable[[str | Path], Storage],
    ):
        self._start, self.strategy = start, strategy
        self._rank, self._world_size, self._driver = rank, world_size, driver
        self._store = CheckpointStore(start.root, opener(start.root), start.token)
        self._fetched = contextlib.ExitStack()
        """Copies of directories that were loaded. Not for `atexit`: a worker has many runs, and leaves without it."""
        self._open_parts = partial(open_parts, opener)
        self._load = partial(load_through, opener, rank=rank, world_size=world_size, keep=self._fetched.callback)
        self.num_collectives: Callable[[], int | None] = lambda: None
        """See Part."""
        self._next_id = start.first_id
        self._is_alone: bool | None = None
        """Whether the saves so far were rank 0's alone."""
        self._turn, self._is_taken = threading.RLock(), False
        self._writer = PartWriter(
            self._store,
            rank,
            partial(driver.send, "part"),
            on_failure=lambda id, reason: driver.send("save_failed", (id, reason)),
            on_progress=partial(driver.send, "writing", None),
        )

    @property
    def next_id(self) -> int:
        """Of the checkpoint that the next `save` is a part of."""
        return self._next_id

    @property
    def has_saved(self) -> bool:
        """Whether this rank has, in this attempt."""
        return self._next_id > self._start.first_id

    def settle(self) -> None:
        """Block until the last one that was saved is a checkpoint. Raises what went wrong with it."""
        if self.has_saved:
            self.wait(self._next_id - 1, LOAD_TIMEOUT_S)

    def save(
        self,
        state: dict[str, Any],
        directory: str | Path | None,
        own: dict[str, Any] | None,
        iteration: int,
        *,
        has_files: bool = False,
        is_alone: bool = False,
    ) -> int:
        """The shared state, and a directory with it, are rank 0's; other ranks give what is their own, and, with
        `has_files`, a directory too, whose files have names that no other rank gives. With `is_alone` the checkpoint
        has no other part than rank 0's. Returns its id."""
        is_first = self._rank == 0
        content = Content(state if is_first else None, directory if is_first or has_files else None, own)
        with self._my_turn():
            self._check_mixture(is_alone)
            id, self._next_id = self._next_id, self._next_id + 1  # the n-th call is number n, also when it fails
            try:
                score = self.strategy.score_of(state) if is_first else None
                earlier = self._writer.save(id, content, iteration, score, self.num_collectives(), is_alone)
            except BaseException as error:
                self._driver.send("save_failed", (id, str(error)))
                raise
            if not is_alone and (is_first or own is not None or content.directory is not None):
                self._driver.send("saving", id)
        if earlier is not None:  # not before: this one is saved all the same
            raise earlier
        return id

    def _check_mixture(self, is_alone: bool) -> None:
        """Ranks count their saves to know which belong together: what one of them does alone, others do not count."""
        if self._world_size > 1 and self._is_alone not in (None, is_alone):
            raise CheckpointError(
                "This run has saved checkpoints on rank 0 alone, with core's upload() or store_path(), and others on "
                "all ranks: which of them belong together could not be told. Use one way, or shard=True on all ranks."
            )
        self._is_alone = is_alone

    def wait(self, id: int, timeout_s: float) -> str:
        """Block until what was saved as `id` is a checkpoint; its path. Raises what went wrong with it, on whichever
        rank or when it was committed."""
        with self._my_turn():
            self._writer.flush()
        self._driver.flush()
        found = self._until_committed(id, self._store.path_of(id), timeout_s)
        if found.problem is not None:  # an earlier one is there, which is not what was asked for
            raise CheckpointWriteError(found.problem)
        return self._store.path_of(id)

    def name_of(self, id: int) -> str:
        return name_of(id)

    def path_of(self, name: str) -> str:
        return self._store.storage.path_of(name)

    def workspace(self) -> Workspace:
        """A directory for files that are to be saved, near to where they go."""
        return self._store.storage.workspace()

    def open(self, path: str, keep: Callable[[Callable[[], None]], object]) -> Checkpoint:
        """A checkpoint of this run, or of another, in this rank's own way to it. `keep` gets what removes the copy of
        its directory, if one was made."""
        return self._load(path, keep=keep)

    @property
    def root(self) -> str:
        """Of the checkpoints of this run."""
        return self._store.root

    @contextlib.contextmanager
    def _my_turn(self) -> Iterator[None]:
        """Waits for other threads. Not for this one, if a signal handler has interrupted it: that would be for ever."""
        with self._turn:
            if self._is_taken:
                raise CheckpointError(
                    "save_checkpoint() or load_checkpoint() was called, by a signal handler perhaps, in the middle of "
                    "another such call of this thread. Let the handler set a flag, and save when the loop sees it."
                )
            self._is_taken = True
            try:
                yield
            finally:
                self._is_taken = False

    def load(self) -> tuple[Checkpoint | None, bool]:
        """What this rank has saved last, else what the attempt began with; and whether it is the latter."""
        if self.has_saved:
            return self._saved(), False
        return self._initial(), True

    def _saved(self) -> Checkpoint:
        with self._my_turn():
            self._writer.flush()
            id = self._next_id - 1
        self._driver.flush()
        deadline = time.monotonic() + LOAD_TIMEOUT_S
        while True:
            found = self._find(id, deadline - time.monotonic())
            try:
                if isinstance(found, DraftFound):
                    when_whole = cache(partial(self._await_whole, id, self._store.storage.path_of(found.draft.name)))
                    return load_draft(self._store.storage, found, self._rank, self._fetched.callback, when_whole)
                return self._load(found.path)
            except (FileNotFoundError, CheckpointNotFoundError):  # committed, or replaced by a newer one, just now
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_RETRY_S)

    def _await_whole(self, id: int, path: str) -> Parts:
        """Blocks until the driver has committed the draft that was found for `id`."""
        self._until_committed(id, path, LOAD_TIMEOUT_S)
        return self._open_parts(path)

    def _until_committed(self, id: int, path: str, timeout_s: float) -> CommittedFound:
        deadline = time.monotonic() + timeout_s
        while isinstance(found := self._find(id, timeout_s), DraftFound):
            if time.monotonic() >= deadline:
                raise CheckpointNotFoundError(
                    f"{path} is not complete after {timeout_s:g} s, so what every rank gave is not known. Call "
                    "save_checkpoint() equally often on all ranks before you ask for all_ranks."
                )
            time.sleep(_LOOK_S)
        return found

    def _initial(self) -> Checkpoint | None:
        given = self._start.checkpoint
        if given is None:
            return None
        return self._load(given) if isinstance(given, str) else Checkpoint(given)

    def close(self) -> None:
        """Block until what was saved is durable; raises what went wrong with it."""
        with self._my_turn():
            self._writer.close()

    def abandon(self) -> None:
        """Block until nothing is being written any more, however that ends. Directories that were loaded are gone then,
        unless they are those of a checkpoint on this machine."""
        with contextlib.suppress(Exception):
            self.close()
        self._fetched.close()

    def _find(self, id: int, timeout_s: float) -> Found:
        """Blocks until rank 0's part of it is there: the shared state is rank 0's."""
        try:
            found: Found = self._driver.ask("checkpoint", id, timeout_s=timeout_s)
        except TimeoutError:
            raise CheckpointNotFoundError(
                f"Rank 0 has not saved {self._store.path_of(id)} within {LOAD_TIMEOUT_S:g} s, although this rank has "
                "called save_checkpoint() as often. Call it equally often on all ranks, or on rank 0 alone."
            ) from None
        return found
