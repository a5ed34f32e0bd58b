"""Checkpoints on a file system: drafted beside their place in a hidden directory, synced, then renamed into it."""

import contextlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from paceline.checkpoints.content.files import DiskFile, SourceFile, write_chunks
from paceline.checkpoints.storage.base import Draft, Fetched
from paceline.checkpoints.storage.workspace import Workspace, sweep
from paceline.regular_files import DOCUMENT_BYTES, open_regular, read_regular

_SYNC_EVERY_BYTES = 64 * 2**20
_DRAFT_SUFFIX = ".draft"


class LocalStorage:
    """A `Storage` in a directory, which several processes may share: a rename either happens or fails."""

    def __init__(self, root: str | Path):
        self._root = Path(os.path.expanduser(root)).absolute()

    @property
    def root(self) -> str:
        return str(self._root)

    def path_of(self, name: str) -> str:
        return str(self._root / name)

    def claim(self) -> None:
        self._root.parent.mkdir(parents=True, exist_ok=True)
        self._root.mkdir()  # the question and the answer in one
        _fsync(self._root.parent)

    def names(self) -> list[str]:
        if not os.path.isdir(self._root):  # unlike listdir, it has an answer for every name
            return []
        try:
            return [name for name in os.listdir(self._root) if not name.startswith(".")]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def read(self, name: str, file: str) -> bytes:
        return read_regular(self._root / name / file, DOCUMENT_BYTES, self._root / name)

    def read_range(self, source: str | Draft, file: str, offset: int, num_bytes: int) -> bytes:
        """A piece of a file; less than `num_bytes` only at its end."""
        with open(open_regular(self._folder(source) / file, self._folder(source)), "rb") as opened:
            opened.seek(offset)
            return opened.read(num_bytes)

    def fetch(self, source: str | Draft, files: Sequence[str]) -> Fetched:
        folder = self._folder(source)
        if isinstance(source, str):
            return Fetched(folder, discard=_keep)
        workspace = self.workspace()  # not the draft itself: a commit moves it away from whoever still reads there
        try:
            for file in files:
                target = workspace.path / "fetched" / file
                target.parent.mkdir(parents=True, exist_ok=True)
                if not _link(folder / file, target):
                    shutil.copyfile(folder / file, target)
        except BaseException:
            workspace.close()
            raise
        return Fetched(workspace.path / "fetched", workspace.close)

    def put(self, draft: Draft, files: Sequence[SourceFile]) -> None:
        self.make_root()
        folder = self._folder(draft)
        _make(folder)
        written: list[Path] = []
        try:
            for file in files:
                _write_file(folder, file)
                written.append(folder / file.name)
            above = {parent for path in written for parent in path.parents}
            for inside in {folder, *(parent for parent in above if folder in parent.parents)}:
                _fsync(inside)
        except BaseException as error:
            for path in written:
                path.unlink(missing_ok=True)
            # The draft was dropped meanwhile, or committed without these: nobody will ask for them, and no second try
            # must bring it back. Should it be asked for after all, the commit notices that they are not there.
            if not isinstance(error, FileNotFoundError) or folder.exists() or not self._root.exists():
                raise

    def folder_of(self, draft: Draft) -> str:
        return ""

    def commit(self, draft: Draft, manifest: SourceFile, files: Sequence[str]) -> None:
        folder, target = self._folder(draft), self._root / draft.name
        if (target / manifest.name).exists():  # first: the files of a draft that was committed are not there any more
            raise FileExistsError(f"{target} exists already")
        for file in files:
            os.stat(folder / file)
        folder.mkdir(parents=True, exist_ok=True)  # of a set without files there is none yet
        (folder / manifest.name).unlink(missing_ok=True)  # of an earlier try
        _write_file(folder, manifest)
        _fsync(folder)
        self._rename(folder, target)
        _fsync(self._root)

    def discard(self, draft: Draft) -> None:
        shutil.rmtree(self._folder(draft), ignore_errors=True)

    def sweep(self) -> None:
        """All drafts: a root belongs to one run, and who calls this is about to begin its next attempt."""
        sweep(self._root)
        with contextlib.suppress(OSError):
            for name in os.listdir(self._root):
                if name.startswith(".") and name.endswith(_DRAFT_SUFFIX):
                    shutil.rmtree(self._root / name, ignore_errors=True)

    def delete(self, name: str) -> None:
        if not (self._root / name).exists():
            return
        with self.workspace() as workspace:
            try:
                os.rename(self._root / name, workspace.path / name)
            except FileNotFoundError:  # another process was faster
                return
            _fsync(self._root)

    def make_root(self) -> None:
        if not self._root.exists():
            self._root.mkdir(parents=True, exist_ok=True)
            _fsync(self._root.parent)

    def workspace(self) -> Workspace:
        self.make_root()
        sweep(self._root)
        return Workspace(self._root)

    def free_bytes(self) -> int | None:
        try:
            return shutil.disk_usage(self._root).free
        except OSError:
            return None

    def _folder(self, source: str | Draft) -> Path:
        if isinstance(source, Draft):
            return self._root / f".{source.name}.{source.token}{_DRAFT_SUFFIX}"
        return self._root / source

    def _rename(self, folder: Path, target: Path) -> None:
        try:
            os.rename(folder, target)
        except OSError:
            # the kernel has several answers to a target that is there; what matters is that it left it alone
            if target.exists():
                raise FileExistsError(f"{target} exists already") from None
            raise


def _make(folder: Path) -> None:
    """Not `Path.mkdir(exist_ok=True)`, which looks again when it is there already: if it was dropped in between, that
    is a FileExistsError, as if somebody else wrote here."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder)


def _write_file(folder: Path, file: SourceFile) -> None:
    path = folder / file.name
    for inside in reversed(path.relative_to(folder).parents[:-1]):
        _make(folder / inside)  # not with its parents: a draft that was dropped stays so
    linked = file if isinstance(file, DiskFile) and _link(file.path, path) else None
    fd = os.open(path, os.O_CLOEXEC | (os.O_RDONLY if linked else os.O_WRONLY | os.O_CREAT | os.O_EXCL), 0o666)
    try:
        if linked:
            os.fsync(fd)
            linked.moved()
        else:
            write_chunks(fd, file, _SYNC_EVERY_BYTES)
    except BaseException:  # from here on the file is ours, and only now
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)


def _link(source: Path, target: Path) -> bool:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        return False
    return True


def _fsync(path: str | Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _keep() -> None:
    """What was fetched is the checkpoint itself."""
