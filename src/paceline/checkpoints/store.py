"""The checkpoints of one run, on disk or behind a URL: list, put, commit, prune; and loading one from anywhere."""

import atexit
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.checkpoints.checkpoint import Checkpoint, CheckpointInfo
from paceline.checkpoints.content import directory as user_directory
from paceline.checkpoints.content.directory import StagedDirectory
from paceline.checkpoints.content.files import DiskFile, FileRecord, MemoryFile, SourceFile, record_of
from paceline.checkpoints.content.snapshot import FILES_DIR, STATE_FILE, Snapshot, rank_dir, read_state, verify
from paceline.checkpoints.manifest import MANIFEST_FILE, Manifest, damaged
from paceline.checkpoints.part import DraftFound, Part
from paceline.checkpoints.storage.base import Draft, Fetched, Storage, open_storage, split_path
from paceline.checkpoints.strategy import CheckpointStrategy, ranked, to_delete
from paceline.errors import CheckpointError, CheckpointNotFoundError

__all__ = ["Checkpoint", "CheckpointInfo", "CheckpointStore", "copy", "load", "load_through", "name_of", "read_info"]

_NAME = re.compile(r"checkpoint_(\d{6,})")
_Infos = list[CheckpointInfo]  # inside the class, `list` is its method


class CheckpointStore:
    """The folder of one run's checkpoints. It need not exist yet; what is in it and is no checkpoint is left
    alone.

    Safe to use from several processes: a checkpoint is there as a whole or not at all. But a folder belongs
    to one run: ids are given, and old checkpoints pruned, by what is in it.
    """

    def __init__(self, root: str | Path, storage: Storage | None = None, token: str | None = None):
        """`token` is the attempt's, by which its drafts are told from those of others; by default a new one."""
        self.storage = storage or open_storage(root)
        self._token = token or secrets.token_hex(4)

    @property
    def root(self) -> str:
        return self.storage.root

    def path_of(self, id: int) -> str:
        return self.storage.path_of(name_of(id))

    def list(self) -> _Infos:
        """The committed checkpoints by id. One with a damaged manifest is left out."""
        return [info for id in sorted(self._ids()) if (info := self._info(id))]

    def latest(self) -> CheckpointInfo | None:
        return next(filter(None, map(self._info, sorted(self._ids(), reverse=True))), None)

    def best(self, strategy: CheckpointStrategy) -> CheckpointInfo | None:
        return next(iter(ranked(self.list(), strategy)), None)

    def next_id(self) -> int:
        """One more than the highest id in use, be it by a whole checkpoint or a torn one."""
        return 1 + max(self._ids(), default=0)

    def stage(self, directory: str | Path) -> StagedDirectory:
        """Copies a user's directory to where `commit` takes it from. ArgumentError if it is none, or holds no
        files.
        """
        return user_directory.stage(directory, self.storage.workspace, FILES_DIR)

    def draft_of(self, id: int) -> Draft:
        return Draft(name_of(id), self._token)

    def put(self, id: int, files: Sequence[SourceFile]) -> None:
        """Add one writer's files to the draft of a checkpoint, which nobody sees yet. OSError if that cannot be, and
        then none of them is left."""
        self.storage.put(self.draft_of(id), files)

    def commit(self, parts: Iterable[Part], world_size: int) -> CheckpointInfo:
        """Make one checkpoint of the parts that were put, rank 0's among them. When this returns, it survives a power
        cut. FileExistsError if there is one with this id: no checkpoint is ever overwritten."""
        by_rank = {part.rank: part for part in parts}
        first = by_rank[0]
        files = tuple(record for rank in sorted(by_rank) for record in by_rank[rank].files)
        manifest = Manifest(
            first.id, first.time, first.score, first.iteration, files, world_size, ranks=tuple(sorted(by_rank))
        )
        _commit(self.storage, self.draft_of(first.id), manifest)
        return manifest.info(self.path_of(first.id))

    def discard(self, id: int) -> None:
        """Give up a checkpoint whose parts will not be complete."""
        self.storage.discard(self.draft_of(id))

    def write(
        self,
        id: int,
        snapshot: Snapshot,
        *,
        score: float | None = None,
        iteration: int = 0,
        directory: str | Path | None = None,
        saved_at: float | None = None,
    ) -> CheckpointInfo:
        """Put and commit a checkpoint that has one writer. OSError if that cannot be, and nothing is left."""
        staged = None if directory is None else self.stage(directory)
        try:
            files: list[SourceFile] = [*snapshot.files(), *(staged.files if staged else ())]
            records = tuple(record_of(file) for file in files)
            self.put(id, files)
            saved_at = time.time() if saved_at is None else saved_at
            return self.commit([Part(id, 0, iteration, saved_at, records, score)], world_size=1)
        except BaseException:
            self.discard(id)
            raise
        finally:
            if staged is not None:
                staged.close()

    def prune(self, strategy: CheckpointStrategy, spare_id: int | None = None) -> _Infos:
        """Deletes what the strategy does not keep, except `spare_id`, and returns it."""
        if not strategy.num_to_keep:
            return []
        doomed = to_delete(self.list(), strategy, spare_id)
        for info in doomed:
            self.storage.delete(name_of(info.id))
        return doomed

    def _ids(self) -> set[int]:
        return {int(match[1]) for match in map(_NAME.fullmatch, self.storage.names()) if match}

    def _info(self, id: int) -> CheckpointInfo | None:
        name, path = name_of(id), self.path_of(id)
        try:
            manifest = Manifest.from_bytes(self.storage.read(name, MANIFEST_FILE), path)
        except (FileNotFoundError, CheckpointError):
            return None
        # the name decides: it is what path_of and delete go by, even if someone has copied the folder
        return replace(manifest.info(path), id=id)


def name_of(id: int) -> str:
    return f"checkpoint_{id:06d}"


def load(path: str | Path) -> Checkpoint:
    """Reads a checkpoint from a path or URL into memory, on the CPU, after checking every byte. Runs no code
    from it.

    CheckpointNotFoundError if there is none (the message says what is there), CheckpointDamagedError if a
    file is not what was written.
    """
    return load_through(open_storage, path)


def load_through(
    opener: Callable[[str | Path], Storage], path: str | Path, rank: int | None = None, world_size: int | None = None
) -> Checkpoint:
    """As `load`, for a process that has its own way to the folder; for a rank, if one is given, with its own part when
    there were as many ranks as there are now."""
    storage, name, manifest = _open(path, opener)
    keeps_rank = world_size == manifest.world_size and rank in manifest.ranks
    with _explain_missing_files(storage, name):
        return _read(storage, name, manifest.files, manifest.world_size, rank if keeps_rank else None)


def load_draft(storage: Storage, found: DraftFound, rank: int) -> Checkpoint:
    """What this run has just saved and the driver has not committed yet. FileNotFoundError once it has, or when it was
    given up."""
    return _read(storage, found.draft, found.files, found.world_size, rank)


def _read(
    storage: Storage, source: str | Draft, records: Sequence[FileRecord], world_size: int, rank: int | None
) -> Checkpoint:
    path = storage.path_of(source.name if isinstance(source, Draft) else source)
    users = [record for record in records if record.name.startswith(f"{FILES_DIR}/")]
    parts = _StoredParts(storage, source, records, world_size, path)
    fetched = _fetch(storage, source, [record for record in records if "/" not in record.name], path)
    try:
        state = read_state(fetched.path, path)
    finally:
        fetched.discard()
    directory = None
    if users:
        kept = _fetch(storage, source, users, path)
        # until the process ends, not until the Checkpoint is dropped: load(...).directory alone must stay good
        atexit.register(kept.discard)
        directory = kept.path / FILES_DIR
    checkpoint = Checkpoint(state, path=path, directory=directory)
    checkpoint.attach(parts, rank)
    return checkpoint


@dataclass(frozen=True)
class _StoredParts:
    """See `Parts`."""

    storage: Storage
    source: str | Draft
    records: Sequence[FileRecord]
    world_size: int
    path: str

    def read(self, rank: int) -> dict[str, Any] | None:
        folder = rank_dir(rank)
        records = [record for record in self.records if record.name.startswith(folder)]
        if not records:
            return None
        fetched = _fetch(self.storage, self.source, records, self.path)
        try:
            return read_state(fetched.path / folder, self.path)
        finally:
            fetched.discard()


def read_info(path: str | Path) -> CheckpointInfo:
    """What `CheckpointStore.list` says about one checkpoint, from its path or URL. Raises as `load` does."""
    storage, name, manifest = _open(path, open_storage)
    return manifest.info(storage.path_of(name))


def copy(path: str | Path, target: str | Path) -> CheckpointInfo:
    """Copies a checkpoint, after checking every byte, to another path or URL, where there may be an empty folder at
    most. On one disk the files are linked. Raises as `load` does.
    """
    source, name, manifest = _open(path, open_storage)
    root, target_name = split_path(target)
    storage = open_storage(root)
    with _explain_missing_files(source, name):
        fetched = _fetch(source, name, manifest.files, source.path_of(name))
    draft = Draft(target_name, secrets.token_hex(4))
    try:
        storage.put(draft, [DiskFile(record.name, fetched.path / record.name) for record in manifest.files])
        _commit(storage, draft, manifest)
    except BaseException:
        storage.discard(draft)
        raise
    finally:
        fetched.discard()
    return manifest.info(storage.path_of(target_name))


def _open(path: str | Path, opener: Callable[[str | Path], Storage]) -> tuple[Storage, str, Manifest]:
    root, name = split_path(path)
    storage = opener(root)
    try:
        data = storage.read(name, MANIFEST_FILE)
    except FileNotFoundError as error:
        nearby = _what_is_there(path, root, opener)
        raise CheckpointNotFoundError(f"There is no checkpoint at {path}: {nearby}") from error
    return storage, name, Manifest.from_bytes(data, storage.path_of(name))


def _commit(storage: Storage, draft: Draft, manifest: Manifest) -> None:
    file = MemoryFile(MANIFEST_FILE, [manifest.to_bytes()])
    storage.commit(draft, file, [record.name for record in manifest.files])


def _fetch(storage: Storage, source: str | Draft, records: Sequence[FileRecord], path: str) -> Fetched:
    fetched = storage.fetch(source, [record.name for record in records])
    try:
        verify(fetched.path, records, path)
    except BaseException:
        fetched.discard()
        raise
    return fetched


@contextmanager
def _explain_missing_files(storage: Storage, name: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        try:
            storage.read(name, MANIFEST_FILE)
        except FileNotFoundError:
            raise CheckpointNotFoundError(
                f"{storage.path_of(name)} was deleted while it was being loaded. "
                "To keep more checkpoints, raise num_to_keep."
            ) from error
        raise damaged(storage.path_of(name), Path(str(error.filename or error)).name, "it is missing") from error


def _what_is_there(path: str | Path, root: str, opener: Callable[[str | Path], Storage]) -> str:
    """For a path that is no checkpoint: the checkpoints in it, if it is a run or a folder of them, or else
    beside it.
    """
    inside = opener(path)
    for storage in (inside, opener(inside.path_of("checkpoints")), opener(root)):
        store = CheckpointStore(storage.root, storage)
        if infos := store.list():
            shown = ", ".join(info.path for info in infos[-5:])
            dots = "…, " if len(infos) > 5 else ""
            return f"load one of the {len(infos)} checkpoints in {store.root}: {dots}{shown}"
    if STATE_FILE in inside.names():
        return f"it has no {MANIFEST_FILE}, so it was never finished."
    if inside.names():
        return "the folder exists, but holds no checkpoints."
    return "nor is there another one in it or beside it."
