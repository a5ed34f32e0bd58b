"""The checkpoints of one run on their storage: where its next attempt begins, commit, keep, find."""

import logging
import os
import secrets
from collections.abc import Iterable, Sequence
from typing import Any

from paceline.checkpoints import Checkpoint, CheckpointInfo, CheckpointStore, CheckpointStrategy
from paceline.checkpoints.content.files import SourceFile
from paceline.checkpoints.part import CommittedFound, DraftFound, Found
from paceline.checkpoints.reading import check_files, load_through
from paceline.checkpoints.saver import Start
from paceline.checkpoints.storage.base import Storage, open_storage
from paceline.checkpoints.storage.landmark import Landmark
from paceline.checkpoints.storage.local import LocalStorage
from paceline.checkpoints.storage.memory import MemoryStorage
from paceline.checkpoints.storage.relay import StorageRelay
from paceline.checkpoints.store import name_of
from paceline.errors import CheckpointDamagedError, CheckpointError, CheckpointNotFoundError, CheckpointWriteError
from paceline.recording.ledger import Cut, Ledger
from paceline.runs.request import RunRequest

logger = logging.getLogger(__name__)

_NUM_ATTEMPTS = 3


class Saved:
    """As the one who commits knows them: nobody else does, nor deletes old ones."""

    def __init__(self, request: RunRequest, root: str, is_resumed: bool = False):
        self._request, self.strategy = request, request.checkpoint_strategy
        self._is_resumed = is_resumed
        self.is_in_memory = request.checkpoint_strategy.num_to_keep == 0
        place = open_storage(root)
        # a name as workers read it: relative paths and file:// URLs are others by then
        self._storage: Storage = MemoryStorage(place.root) if self.is_in_memory else place
        given = request.checkpoint if isinstance(request.checkpoint, str) else None
        self.relay = StorageRelay(self._storage, given)
        self.latest: CheckpointInfo | None = None
        self._store = CheckpointStore(root, self._storage)
        self._world_size = 1
        self._spare_id: int | None = None
        self._deleted: set[int] = set()
        """Checkpoints that somebody did not want any more, though they were the latest perhaps."""

    @property
    def root(self) -> str:
        return self._storage.root

    def begin(self, world_size: int) -> tuple[Start, tuple[Landmark, ...]]:
        """A new attempt of so many ranks: it goes on from the latest checkpoint, and its drafts are apart from all
        before it."""
        self._world_size = world_size
        if self._is_resumed:
            self._is_resumed, self.latest = False, self._find_whole()
        self._storage.sweep()
        token = secrets.token_hex(4)
        self._store = CheckpointStore(self.root, self._storage, token)
        first_id = max(
            self._store.next_id(), self._request.first_checkpoint_id, self.latest.id + 1 if self.latest else 1
        )
        checkpoint: str | dict[str, Any] | None = self._request.checkpoint
        iteration = self._request.first_iteration
        if self.latest is not None:
            checkpoint, iteration = self.latest.path, self.latest.iteration
        self._spare_id = None if self.latest is None else self.latest.id
        return Start(checkpoint, iteration, first_id, self.root, token), self.relay.begin()

    def _find_latest(self) -> CheckpointInfo | None:
        """What earlier drivers of this run have committed."""
        latest = self._store.latest()
        return latest if latest is not None and latest.id >= self._request.first_checkpoint_id else None

    def _find_whole(self) -> CheckpointInfo | None:
        """The same, but one that is damaged is passed over, with a warning. CheckpointDamagedError if none is whole: a
        run never begins anew by itself. Behind a URL nothing is checked: that would be to fetch all of it twice."""
        latest = self._find_latest()
        if latest is None or not isinstance(self._storage, LocalStorage):
            return latest
        first: CheckpointDamagedError | None = None
        for info in reversed(self._store.list()):
            if info.id < self._request.first_checkpoint_id:
                break
            try:
                check_files(self._storage, info.path)
            except CheckpointDamagedError as error:
                logger.warning("%s The run goes on from an earlier one, if there is one.", error)
                first = first or error
            else:
                return info
        raise first or CheckpointNotFoundError(f"There is no checkpoint in {self.root} any more.")

    def find_given(self, start: Start) -> CheckpointInfo | None:
        """What an attempt begins with, if that was given to the run and yet is among its own: a trial that goes on."""
        return next((info for info in self._store.list() if info.path == start.checkpoint), None)

    def put(self, id: int, files: Sequence[SourceFile]) -> None:
        """What somebody in this very process has for a checkpoint. OSError if that cannot be."""
        self._store.put(id, files)

    def commit(self, cut: Cut) -> CheckpointInfo | CheckpointWriteError:
        """Make a checkpoint of it: what it is now, or why it is none. Older ones stay until `prune`."""
        result = self._try_to_commit(cut)
        if isinstance(result, CheckpointInfo):
            self.latest = result
        return result

    def _try_to_commit(self, cut: Cut) -> CheckpointInfo | CheckpointWriteError:
        path = self._store.path_of(cut.id)
        for attempt in range(1, _NUM_ATTEMPTS + 1):
            try:
                return self._store.commit(cut.parts, self._world_size)
            except FileExistsError as error:
                if attempt > 1 and (info := self._committed(cut)) is not None:
                    return info  # the try before had worked, and only the answer was lost
                raise CheckpointWriteError(
                    f"The checkpoint {path} was not written, because it exists already: another run uses this folder. "
                    "Give each run its own storage_path."
                ) from error
            except OSError as error:
                logger.warning("Committing %s failed (%s), attempt %d of %d", path, error, attempt, _NUM_ATTEMPTS)
                reason = CheckpointWriteError(f"The checkpoint {path} could not be committed: {error}.")
        self.discard([cut.id])
        return reason

    def _committed(self, cut: Cut) -> CheckpointInfo | None:
        """What is there of it, if it is ours: nobody else has saved at that very moment."""
        first = cut.parts[0]
        return next((info for info in self._store.list() if (info.id, info.time) == (cut.id, first.time)), None)

    def discard(self, ids: Iterable[int]) -> None:
        """Delete what was put for checkpoints that will never be."""
        for id in ids:
            try:
                self._store.discard(id)
            except OSError as error:
                logger.warning("What was begun of %s could not be deleted: %s", self._store.path_of(id), error)

    def prune(self) -> None:
        """Delete what the strategy does not keep."""
        # In memory there is room for the latest, and what others may be about to load.
        strategy = CheckpointStrategy(num_to_keep=1) if self.is_in_memory else self.strategy
        try:
            self._store.prune(strategy, self._spare_id)
        except (OSError, CheckpointError) as error:
            # one too many on disk is no reason to stop training, and the next commit prunes again
            logger.warning("Old checkpoints in %s could not be deleted: %s", self.root, error)

    def delete(self, id: int) -> None:
        """One that was committed. CheckpointNotFoundError if there is none of this id among this run's own."""
        name = name_of(id)
        path = self._storage.path_of(name)
        is_ours = id >= self._request.first_checkpoint_id and any(info.id == id for info in self._store.list())
        if not is_ours or (isinstance(self._storage, LocalStorage) and os.path.islink(path)):
            raise CheckpointNotFoundError(f"There is no checkpoint {path} of this run that could be deleted.")
        self._storage.delete(name)
        if self.latest is not None and self.latest.id == id:
            self.latest = self._find_latest()
        if self._spare_id == id:
            self._spare_id = None
        self._deleted.add(id)

    def find(self, id: int, rank: int, ledger: Ledger) -> Found | CheckpointError | None:
        """Where a rank finds what it has saved as `id`, or something newer; None as long as rank 0 has not saved it. If
        it was given up, and nothing newer is there, what was committed last. Who waits for what could not be written
        learns why: its error must not hide the cause."""
        is_void = id in ledger.failed or id in self._deleted
        if self.latest is not None and (self.latest.id >= id or is_void):
            return CommittedFound(self.latest.path, ledger.failed.get(id))
        if id in self._deleted:
            return CheckpointNotFoundError(f"{self._store.path_of(id)} was deleted, and there is no earlier one.")
        if id in ledger.failed:
            return CheckpointWriteError(ledger.failed[id])
        found = ledger.find(id, rank)
        if found is None:
            is_due = self.latest is not None and ledger.is_given_up(id)
            return CommittedFound(self.latest.path) if is_due and self.latest is not None else None
        id, parts = found
        files = tuple(record for part in parts.values() for record in part.files)
        return DraftFound(self._store.draft_of(id), files, self._world_size)

    def load(self, path: str) -> Checkpoint:
        """One of this run's, or the one it was given; in memory, too."""
        return load_through(lambda root: self._storage if str(root) == self.root else open_storage(root), path)

    def load_latest(self) -> dict[str, Any] | None:
        """The latest one, else the one that the run was given."""
        if self.latest is not None:
            return self.load(self.latest.path)
        given = self._request.checkpoint
        return self.load(given) if isinstance(given, str) else given

    def best(self) -> CheckpointInfo | None:
        return None if self.is_in_memory else self._store.best(self.strategy)

    def close(self) -> None:
        """Leave nothing but the checkpoints that are to be kept. Idempotent."""
        self._storage.sweep()
        if self._spare_id is not None and self.latest is not None and self.latest.id != self._spare_id:
            self._spare_id = None
            self.prune()
        self.relay.close()
