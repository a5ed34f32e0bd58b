"""The worker's side of `save_checkpoint`: training waits while the state is copied in memory; a thread writes
it out.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoints.checkpoint import CheckpointInfo
from paceline.checkpoints.content import directory as user_directory
from paceline.checkpoints.content.directory import StagedDirectory
from paceline.checkpoints.content.snapshot import Buffers, Snapshot, encode
from paceline.checkpoints.store import CheckpointStore
from paceline.checkpoints.strategy import CheckpointStrategy
from paceline.errors import CheckpointError, CheckpointWriteError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Job:
    id: int
    snapshot: Snapshot
    staged: StagedDirectory | None
    score: float | None
    iteration: int
    saved_at: float


class CheckpointWriter:
    """Writes the checkpoints of one worker, one at a time, in the background. Not for use by several threads.

    `first_id` is usually `store.next_id()`. In the background thread, `before_commit` is called before a checkpoint is
    written, `on_commit` once it is durable and older ones are pruned, and `on_failure` when it could not be written.
    `spare_id` is never pruned: other ranks may be about to load the checkpoint from which this run goes on. An OSError
    is tried again, `num_attempts` times in all, with `sleep` in between; then the next call of `save`, `flush` or
    `close` raises it as CheckpointWriteError, and the writer can go on.
    """

    def __init__(
        self,
        store: CheckpointStore,
        strategy: CheckpointStrategy,
        first_id: int,
        on_commit: Callable[[CheckpointInfo], None],
        *,
        before_commit: Callable[[], None] = lambda: None,
        on_failure: Callable[[str], None] = lambda reason: None,
        spare_id: int | None = None,
        num_attempts: int = 3,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self._store = store
        self._strategy = strategy
        self._next_id = first_id
        self._before_commit, self._on_commit, self._on_failure = before_commit, on_commit, on_failure
        self._spare_id = spare_id
        self._num_attempts = num_attempts
        self._sleep = sleep
        self._buffers = Buffers()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._closed = False

    def save(self, state: Mapping[str, Any], directory: str | Path | None = None, iteration: int = 0) -> int:
        """Returns the id of the checkpoint that is now being written.

        Blocks while the previous one is still being written, and while state and directory are copied; both
        are the caller's again when this returns. Raises in the caller's frame what is wrong with its values.
        With `num_to_keep=0` it checks all the same, but writes nothing: `format.copy_of` makes the copy for
        memory.
        """
        if self._closed:
            raise CheckpointError("This checkpoint writer is closed: save before the training function ends.")
        score = self._strategy.score_of(state)
        encoded = encode(state)
        if directory is not None:
            user_directory.check(directory)
        self.flush()
        id = self._next_id
        if self._strategy.num_to_keep != 0:
            snapshot = encoded.snapshot(self._buffers)
            staged = None if directory is None else self._stage(id, directory)
            job = _Job(id, snapshot, staged, score, iteration, time.time())
            self._thread = threading.Thread(target=self._work, args=(job,), name="paceline-checkpoint", daemon=True)
            self._thread.start()
        self._next_id += 1
        return id

    def flush(self) -> None:
        """Waits until everything saved is committed. Raises what went wrong since the last call, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Flushes, and takes no more. Idempotent."""
        self._closed = True
        self.flush()
        self._buffers = Buffers()

    def _stage(self, id: int, directory: str | Path) -> StagedDirectory:
        try:
            return self._store.stage(directory)
        except OSError as error:
            raise self._write_error(id, error, num_attempts=1) from error

    def _work(self, job: _Job) -> None:
        try:
            self._before_commit()
            info = self._commit(job)
            try:
                self._store.prune(self._strategy, self._spare_id)
            except OSError as error:
                # one too many on disk is no reason to stop training, and the next commit prunes again
                logger.warning("Old checkpoints in %s could not be deleted: %s", self._store.root, error)
            self._on_commit(info)
        except BaseException as error:  # it surfaces in flush
            self._error = error
            self._on_failure(str(error))
        finally:
            if job.staged is not None:
                job.staged.close()

    def _commit(self, job: _Job) -> CheckpointInfo:
        attempt = 1
        while True:
            try:
                return self._store.commit(
                    job.id,
                    job.snapshot,
                    score=job.score,
                    iteration=job.iteration,
                    directory=job.staged,
                    saved_at=job.saved_at,
                )
            except OSError as error:
                if attempt == self._num_attempts or isinstance(error, FileExistsError):
                    raise self._write_error(job.id, error, attempt) from error
                logger.warning("Writing %s failed (%s), trying again", self._store.path_of(job.id), error)
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
