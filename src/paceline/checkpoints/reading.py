"""Reading checkpoints from wherever they are, after checking every byte. Runs no code from them."""

import atexit
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from paceline.checkpoints.checkpoint import Checkpoint, CheckpointInfo, Parts
from paceline.checkpoints.content.files import DiskFile, FileRecord
from paceline.checkpoints.content.snapshot import ARRAYS_FILE, FILES_DIR, STATE_FILE, rank_dir, read_state, verify
from paceline.checkpoints.manifest import MANIFEST_FILE, Manifest, damaged, unreadable
from paceline.checkpoints.part import DraftFound
from paceline.checkpoints.storage.base import Draft, Fetched, Storage, open_storage, split_path
from paceline.checkpoints.store import CheckpointStore, commit_draft, is_name
from paceline.errors import CheckpointDamagedError, CheckpointNotFoundError
from paceline.regular_files import UnreadableFileError

_Keep = Callable[[Callable[[], None]], object]


def load(path: str | Path) -> Checkpoint:
    """Reads a checkpoint from a path or URL into memory, on the CPU, after checking every byte. Runs no code
    from it.

    CheckpointNotFoundError if there is none (the message says what is there), CheckpointDamagedError if a
    file is not what was written.
    """
    return load_through(open_storage, path)


def load_through(
    opener: Callable[[str | Path], Storage],
    path: str | Path,
    rank: int | None = None,
    world_size: int | None = None,
    keep: _Keep = atexit.register,
) -> Checkpoint:
    """As `load`, for a process that has its own way to the folder; for a rank, if one is given, with its own part when
    there were as many ranks as there are now. `keep` gets what removes the copy of a directory, if one was made."""
    storage, name, manifest = _open(path, opener)
    keeps_rank = world_size == manifest.world_size and rank in manifest.ranks
    with _explain_missing_files(storage, name):
        return _read(
            storage, manifest.place(name), manifest.files, manifest.world_size, rank if keeps_rank else None, keep
        )


def load_draft(
    storage: Storage, found: DraftFound, rank: int, keep: _Keep, when_whole: Callable[[], Parts]
) -> Checkpoint:
    """What this run has just saved and the driver has not committed yet. FileNotFoundError once it has, or when it was
    given up. What ranks have of their own that had not saved it yet is read from `when_whole()`."""
    checkpoint = _read(storage, found.draft, found.files, found.world_size, None, keep)
    drafted = _StoredParts(storage, found.draft, found.files, found.world_size, storage.path_of(found.draft.name))
    checkpoint.attach(_DraftParts(drafted, rank, when_whole), rank)
    return checkpoint


def open_parts(opener: Callable[[str | Path], Storage], path: str | Path) -> Parts:
    """What the ranks have of their own in a checkpoint. Raises as `load` does."""
    storage, name, manifest = _open(path, opener)
    return _StoredParts(storage, manifest.place(name), manifest.files, manifest.world_size, storage.path_of(name))


def _read(
    storage: Storage, source: str | Draft, records: Sequence[FileRecord], world_size: int, rank: int | None, keep: _Keep
) -> Checkpoint:
    path = storage.path_of(_name_of(source))
    users = [record for record in records if record.name.startswith(f"{FILES_DIR}/")]
    parts = _StoredParts(storage, source, records, world_size, path)
    top = [record for record in records if "/" not in record.name]
    state = _read_tree(partial(_fetch, storage, source), top, "", path)
    directory = None
    if users:
        kept = _fetch(storage, source, users, path)
        _refuse_others(kept.path / FILES_DIR, users, path)
        # not until the Checkpoint is dropped: load(...).directory alone must stay good, until the process ends
        keep(kept.discard)
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
        return _read_tree(self._fetch, records, folder, self.path)

    def _fetch(self, records: Sequence[FileRecord], path: str) -> Fetched:
        try:
            return _fetch(self.storage, self.source, records, path)
        except FileNotFoundError:
            name = _name_of(self.source)
            with _explain_missing_files(self.storage, name):
                return _fetch(self.storage, name, records, path)  # a draft that has been committed since


@dataclass(frozen=True)
class _DraftParts:
    """See `Parts`. Of the rank that loads it, what is in the draft is all there is."""

    drafted: _StoredParts
    rank: int
    when_whole: Callable[[], Parts]

    @property
    def world_size(self) -> int:
        return self.drafted.world_size

    def read(self, rank: int) -> dict[str, Any] | None:
        part = self.drafted.read(rank)
        return part if part is not None or rank == self.rank else self.when_whole().read(rank)


def _name_of(source: str | Draft) -> str:
    return source.name if isinstance(source, Draft) else source.partition("/")[0]


def read_info(path: str | Path) -> CheckpointInfo:
    """What `CheckpointStore.list` says about one checkpoint, from its path or URL. Raises as `load` does."""
    storage, name, manifest = _open(path, open_storage)
    return manifest.info(storage.path_of(name))


def check_files(storage: Storage, path: str | Path) -> None:
    """Read every byte of a checkpoint, and nothing more. Raises as `load` does."""
    storage, name, manifest = _open(path, lambda root: storage)
    with _explain_missing_files(storage, name):
        _fetch(storage, manifest.place(name), manifest.files, storage.path_of(name)).discard()


def copy(path: str | Path, target: str | Path) -> CheckpointInfo:
    """Copies a checkpoint, after checking every byte, to another path or URL, where there may be an empty folder at
    most. On one disk the files are linked. Raises as `load` does.
    """
    source, name, manifest = _open(path, open_storage)
    root, target_name = split_path(target)
    storage = open_storage(root)
    with _explain_missing_files(source, name):
        fetched = _fetch(source, manifest.place(name), manifest.files, source.path_of(name))
    draft = Draft(target_name, secrets.token_hex(4))
    manifest = replace(manifest, folder=storage.folder_of(draft))
    try:
        storage.put(draft, [DiskFile(record.name, fetched.path / record.name) for record in manifest.files])
        commit_draft(storage, draft, manifest)
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
    except UnreadableFileError as error:
        raise unreadable(storage.path_of(name), error) from error
    return storage, name, Manifest.from_bytes(data, storage.path_of(name))


def _fetch(storage: Storage, source: str | Draft, records: Sequence[FileRecord], path: str) -> Fetched:
    try:
        fetched = storage.fetch(source, [record.name for record in records])
        try:
            verify(fetched.path, records, path)
        except BaseException:
            fetched.discard()
            raise
    except UnreadableFileError as error:
        raise unreadable(path, error) from error
    return fetched


def _read_tree(
    fetch: Callable[[Sequence[FileRecord], str], Fetched], records: Sequence[FileRecord], folder: str, path: str
) -> dict[str, Any]:
    """The values in a folder of the checkpoint. A file that its manifest does not name is not read, though it may be
    there: nothing tells whether that is what was written."""
    names = {record.name for record in records}
    if folder + STATE_FILE not in names:
        raise damaged(path, MANIFEST_FILE, f"it names no {folder}{STATE_FILE}")
    fetched = fetch(records, path)
    try:
        return read_state(fetched.path / folder, path, has_arrays=folder + ARRAYS_FILE in names)
    finally:
        fetched.discard()


def _refuse_others(directory: Path, records: Sequence[FileRecord], path: str) -> None:
    """CheckpointDamagedError for what was put among the user's files later: whoever gets the directory reads all of it,
    and takes it for checked."""
    known = {os.path.join(directory, *PurePosixPath(record.name).parts[1:]) for record in records}
    for folder, subfolders, files in os.walk(directory):
        links = [name for name in subfolders if os.path.islink(os.path.join(folder, name))]
        for name in (*files, *links):
            if os.path.join(folder, name) not in known:
                raise CheckpointDamagedError(
                    f"The checkpoint {path} has changed: {os.path.join(folder, name)} is not one of the files that "
                    "were saved. Take it away, or load another checkpoint of the run."
                )


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
        path = str(error.filename or error)
        _, is_within, file = path.rpartition(f"/{name}/")  # state.json alone may be that of any rank
        raise damaged(storage.path_of(name), file if is_within else Path(path).name, "it is missing") from error


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
    names = inside.names()
    if STATE_FILE in names or (names and is_name(split_path(path)[1])):
        return f"it has no {MANIFEST_FILE}, so it was never finished."
    if names:
        return "the folder exists, but holds no checkpoints."
    return "nor is there another one in it or beside it."
