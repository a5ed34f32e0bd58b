"""A rank's side of `save_checkpoint`: training waits while the state is copied in memory; a thread writes it out."""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.checkpoints.content import directory as user_directory
from paceline.checkpoints.content.directory import StagedDirectory
from paceline.checkpoints.content.files import DiskFile, MemoryFile, record_of
from paceline.checkpoints.content.snapshot import Buffers, encode, rank_dir
from paceline.checkpoints.part import Part
from paceline.checkpoints.store import CheckpointStore
from paceline.errors import CheckpointError, CheckpointWriteError

logger = logging.getLogger(__name__)

_TELL_S = 0.25
"""How often a write is told that takes longer."""


@dataclass(frozen=True)
class Content:
    """What a rank saves: the shared state (rank 0 alone), a directory of files with it (of other ranks too, where the
    names of their files differ), and what is the rank's own."""

    shared: Mapping[str, Any] | None = None
    directory: str | Path | None = None
    own: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class _Job:
    part: Part
    files: list[MemoryFile | DiskFile]
    staged: StagedDirectory | None


class PartWriter:
    """Writes the parts of one rank, one at a time, in the background. Not for use by several threads.

    In the background thread, `on_part` is called once a part is durable, and `on_failure` when it could not be written.
    While it takes long, `on_progress` is called now and then: when bytes have moved, and not while the disk is stuck.
    An OSError is tried again, `num_attempts` times in all, with `sleep` in between; then the next call of `save`
    returns it as CheckpointWriteError, or `flush` or `close` raises it, and the writer can go on.
    """

    def __init__(
        self,
        store: CheckpointStore,
        rank: int,
        on_part: Callable[[Part], None],
        *,
        on_failure: Callable[[int, str], None] = lambda id, reason: None,
        on_progress: Callable[[], None] = lambda: None,
        num_attempts: int = 3,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._store, self._rank = store, rank
        self._on_part, self._on_failure, self._on_progress = on_part, on_failure, on_progress
        self._num_attempts, self._sleep, self._clock = num_attempts, sleep, clock
        self._next_told = 0.0
        self._shared_buffers, self._own_buffers = Buffers(), Buffers()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._closed = False

    def save(
        self,
        id: int,
        content: Content,
        iteration: int = 0,
        score: float | None = None,
        num_collectives: int | None = None,
        is_alone: bool = False,
    ) -> BaseException | None:
        """Write this rank's part of the checkpoint `id`. Returns what went wrong with the one before, if anything.

        Blocks while the previous one is still being written, and while state and directory are copied; both are the
        caller's again when this returns. Raises in the caller's frame what is wrong with its values. A part without
        content is told at once: it only says that this rank has come so far.
        """
        if self._closed:
            raise CheckpointError("This checkpoint writer is closed: save before the training function ends.")
        shared = None if content.shared is None else encode(content.shared)
        own = None if content.own is None else encode(content.own)
        if content.directory is not None:
            user_directory.check(content.directory)
        earlier = self._wait()
        part = Part(
            id, self._rank, iteration, time.time(), score=score, num_collectives=num_collectives, is_alone=is_alone
        )
        files: list[MemoryFile | DiskFile] = []
        if shared is not None:
            files += shared.snapshot(self._shared_buffers).files()
        if own is not None:
            files += own.snapshot(self._own_buffers).files(rank_dir(self._rank))
        if files or content.directory is not None:
            staged = None if content.directory is None else self._stage(id, content.directory)
            files += staged.files if staged else ()
            job = _Job(part, [replace(file, moved=self._tell_progress) for file in files], staged)
            self._thread = threading.Thread(target=self._work, args=(job,), name="paceline-checkpoint", daemon=True)
            self._thread.start()
        else:
            self._on_part(part)
        return earlier

    def flush(self) -> None:
        """Waits until everything saved is durable and told. Raises what went wrong since the last call, once."""
        error = self._wait()
        if error is not None:
            raise error

    def _wait(self) -> BaseException | None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        return error

    def close(self) -> None:
        """Flushes, and takes no more. Idempotent."""
        self._closed = True
        self.flush()
        self._shared_buffers, self._own_buffers = Buffers(), Buffers()

    def _stage(self, id: int, directory: str | Path) -> StagedDirectory:
        try:
            return self._store.stage(directory)
        except OSError as error:
            raise self._write_error(id, error, num_attempts=1) from error

    def _tell_progress(self) -> None:
        if self._clock() >= self._next_told:
            self._next_told = self._clock() + _TELL_S
            self._on_progress()

    def _work(self, job: _Job) -> None:
        self._next_told = self._clock() + _TELL_S
        try:
            records = tuple(record_of(file) for file in job.files)
            self._put(job)
        except BaseException as error:  # it surfaces in flush
            self._error = error
            self._on_failure(job.part.id, str(error))
        else:
            try:
                self._on_part(replace(job.part, files=records))
            except BaseException as error:  # of who listens; the part itself is durable
                self._error = error
        finally:
            if job.staged is not None:
                job.staged.close()

    def _put(self, job: _Job) -> None:
        attempt = 1
        while True:
            try:
                return self._store.put(job.part.id, job.files)
            except OSError as error:
                if attempt == self._num_attempts or isinstance(error, FileExistsError):
                    raise self._write_error(job.part.id, error, attempt) from error
                # A draft may be dropped in this very moment, since other ranks are far ahead: that is nobody's worry.
                level = logging.INFO if isinstance(error, FileNotFoundError) else logging.WARNING
                logger.log(level, "Writing %s failed (%s), trying again", self._store.path_of(job.part.id), error)
            self._sleep(0.2 * 4 ** (attempt - 1))
            attempt += 1

    def _write_error(self, id: int, cause: OSError, num_attempts: int) -> CheckpointWriteError:
        path = self._store.path_of(id)
        if isinstance(cause, FileExistsError):
            return CheckpointWriteError(
                f"The checkpoint {path} was not written, because it exists already: "
                "another run uses this folder. Give each run its own storage_path."
            )
        free_bytes = self._store.storage.free_bytes()
        space = "" if free_bytes is None else f" Free space there: {free_bytes / 1e6:,.1f} MB."
        tries = "1 attempt" if num_attempts == 1 else f"{num_attempts} attempts"
        return CheckpointWriteError(
            f"The checkpoint {path} could not be written after {tries}: {cause}.{space} "
            "Earlier checkpoints are untouched. Make room, keep fewer of them with "
            "CheckpointStrategy(num_to_keep=...), or put them elsewhere with its storage_path."
        )
