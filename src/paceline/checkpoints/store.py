"""The checkpoints of one run, on disk or behind a URL: list, put, commit, prune."""

import re
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from paceline.checkpoints.checkpoint import CheckpointInfo
from paceline.checkpoints.content import directory as user_directory
from paceline.checkpoints.content.directory import StagedDirectory
from paceline.checkpoints.content.files import MemoryFile, SourceFile, record_of
from paceline.checkpoints.content.snapshot import FILES_DIR, Snapshot
from paceline.checkpoints.manifest import MANIFEST_FILE, Manifest
from paceline.checkpoints.part import Part
from paceline.checkpoints.storage.base import Draft, Storage, open_storage
from paceline.checkpoints.strategy import CheckpointStrategy, ranked, to_delete
from paceline.errors import CheckpointError
from paceline.regular_files import UnreadableFileError

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
        """The committed checkpoints by id. One whose manifest is damaged, or cannot be read, is left out."""
        return [info for id in sorted(self._ids()) if (info := self._info(id))]

    def latest(self) -> CheckpointInfo | None:
        return next(filter(None, map(self._info, sorted(self._ids(), reverse=True))), None)

    def best(self, strategy: CheckpointStrategy) -> CheckpointInfo | None:
        return next(iter(ranked(self.list(), strategy)), None)

    def next_id(self) -> int:
        """One more than the highest id in use, be it by a whole checkpoint or a torn one."""
        return 1 + max(self._ids(), default=0)

    def stage(self, directory: str | Path) -> StagedDirectory:
        """Copies a user's directory to where `put` takes it from. ArgumentError if it is none, or holds no
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
        draft, ranks = self.draft_of(first.id), tuple(sorted(by_rank))
        folder = self.storage.folder_of(draft)
        manifest = Manifest(first.id, first.time, first.score, first.iteration, files, world_size, ranks, folder)
        commit_draft(self.storage, draft, manifest)
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
        except (FileNotFoundError, UnreadableFileError, CheckpointError):
            return None
        # the name decides: it is what path_of and delete go by, even if someone has copied the folder
        return replace(manifest.info(path), id=id)


def name_of(id: int) -> str:
    return f"checkpoint_{id:06d}"


def is_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def commit_draft(storage: Storage, draft: Draft, manifest: Manifest) -> None:
    """Make it a checkpoint, of the files that the manifest names."""
    file = MemoryFile(MANIFEST_FILE, [manifest.to_bytes()])
    storage.commit(draft, file, [record.name for record in manifest.files])
