"""Directories of files as checkpoints of the run, saved and found by their id: the name in the run's `checkpoints`."""

import hashlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from paceline.checkpoints import Checkpoint
from paceline.checkpoints.content.directory import files_of
from paceline.checkpoints.content.snapshot import encode
from paceline.checkpoints.storage.base import split_path
from paceline.checkpoints.store import is_name
from paceline.core.distributed import DistributedContext
from paceline.core.shards import merge_metadata, owners_of
from paceline.errors import (
    ArgumentError,
    ArgumentTypeError,
    CheckpointError,
    CheckpointNotFoundError,
    TrainerStateError,
)
from paceline.rank_session import Session

Selector = Callable[[str], bool]
"""Of a file's name in the directory, with "/" between folders: whether it is wanted."""


class CheckpointContext:
    """Metadata is the shared state of a checkpoint, as `paceline.load_checkpoint()` gives it; files are in its
    `directory`. A number in it can be the score of the run's CheckpointStrategy."""

    def __init__(self, running: Session, distributed: DistributedContext):
        self._session, self._distributed = running, distributed

    def upload(
        self,
        ckpt_dir: str | os.PathLike[str] | None,
        metadata: Mapping[str, Any] | None = None,
        shard: bool = False,
        selector: Selector | None = None,
    ) -> str:
        """Make a checkpoint of the files in a directory, or of those that the selector wants. Returns its id when it is
        complete on storage. On the chief alone; with `shard`, on all ranks together, with the files of all of them, and
        a directory may be None where there are none."""
        return self._upload(ckpt_dir, metadata, shard, selector)

    @contextmanager
    def store_path(self, metadata: Mapping[str, Any] | None = None, shard: bool = False) -> Iterator[tuple[Path, str]]:
        """A directory to write to, and the id of the checkpoint that it is at the end of the block. Who calls it is as
        for `upload`."""
        self._check_caller(shard)
        saver = self._session.saver
        with saver.workspace() as workspace:
            folder = workspace.path / "stored"
            folder.mkdir()
            id = saver.name_of(saver.next_id)
            yield folder, id
            stored = self._upload(folder, metadata, shard, None)
            if stored != id:
                raise CheckpointError(f"Something else was saved in the block of store_path(): its files are {stored}.")

    def download(self, storage_id: str, ckpt_dir: str | os.PathLike[str], selector: Selector | None = None) -> None:
        """Copy the files of a checkpoint into a directory, which is made if it is not there. On any rank, also several
        into the same directory: each file is there as a whole as soon as it is there."""
        with ExitStack() as stack:
            directory = self._open(storage_id, stack).directory
            folder = Path(ckpt_dir).expanduser()
            folder.mkdir(parents=True, exist_ok=True)
            for name, path in _selected(directory, selector):
                _copy(path, folder / name)

    @contextmanager
    def restore_path(self, storage_id: str, selector: Selector | None = None) -> Iterator[Path]:
        """The files of a checkpoint, for the time of the block. On any rank. Read there, and change nothing: if it is
        on this machine, it is the checkpoint itself."""
        with ExitStack() as stack:
            directory = self._open(storage_id, stack).directory
            if directory is not None and selector is None:
                yield directory
                return
            folder = stack.enter_context(self._session.saver.workspace()).path / "restored"
            folder.mkdir()
            _link(_selected(directory, selector), folder)
            yield folder

    def get_metadata(self, storage_id: str) -> dict[str, Any]:
        with ExitStack() as stack:
            return dict(self._open(storage_id, stack))

    def delete(self, storage_id: str) -> None:
        """Delete a checkpoint of this run. On one rank. CheckpointNotFoundError if there is none of this id."""
        name = self._name(storage_id)
        if name is None:
            raise CheckpointNotFoundError(f"{storage_id!r} is no checkpoint of this run, and only these are deleted.")
        self._session.delete_checkpoint(int(name.rpartition("_")[2]))

    def _open(self, storage_id: str, stack: ExitStack) -> Checkpoint:
        saver, name = self._session.saver, self._name(storage_id)
        return saver.open(saver.path_of(name) if name is not None else storage_id, stack.callback)

    def _name(self, storage_id: str) -> str | None:
        """Of a checkpoint of this run; None for a path or URL of another one."""
        text = os.fspath(storage_id)
        if not isinstance(text, str) or not text or ".." in re.split(r"[/\\]", text) or "\0" in text:
            raise ArgumentError(f"{storage_id!r} is no id of a checkpoint: expected a name like 'checkpoint_000001'.")
        root, name = ("", text) if "/" not in text else split_path(text)
        saver = self._session.saver
        if root in ("", saver.root) and is_name(name):
            if os.path.islink(saver.path_of(name)):
                raise CheckpointNotFoundError(f"{saver.path_of(name)} is a link, and no checkpoint of this run.")
            return name
        if not root:
            raise CheckpointNotFoundError(
                f"There is no checkpoint {text!r} in this run: give a name such as 'checkpoint_000001', or a path."
            )
        return None

    def _check_caller(self, shard: bool) -> None:
        if not shard and not self._distributed.is_chief:
            raise TrainerStateError(
                f"Without shard=True a checkpoint is the chief's: this is rank {self._distributed.rank}. Call it on "
                "rank 0 alone, or with shard=True on all ranks."
            )

    def _upload(
        self,
        ckpt_dir: str | os.PathLike[str] | None,
        metadata: Mapping[str, Any] | None,
        shard: bool,
        selector: Selector | None,
    ) -> str:
        self._check_caller(shard)
        is_alone = not shard or self._distributed.size == 1
        if is_alone:
            files, state = _files(ckpt_dir, selector), _checked(metadata)
            if ckpt_dir is None:
                raise ArgumentError("upload(None): expected a directory; with shard=True some ranks may have none.")
        else:
            files, state = self._share(ckpt_dir, metadata, selector)
        with self._session.saver.workspace() as workspace:
            folder = workspace.path / "uploaded"
            folder.mkdir()
            _link(files.items(), folder)
            timeout_s = self._distributed.timeout_s
            return self._session.upload(state, folder if files else None, is_alone=is_alone, timeout_s=timeout_s)

    def _share(
        self, ckpt_dir: str | os.PathLike[str] | None, metadata: Mapping[str, Any] | None, selector: Selector | None
    ) -> tuple[dict[str, Path], dict[str, Any]]:
        """The files that this rank gives, and the metadata of all. What is wrong on one rank is raised on all."""
        files: dict[str, Path] = {}
        listing: dict[str, str] = {}
        mistake: Exception | None = None
        try:
            files = _files(ckpt_dir, selector)
            listing = {name: _digest(path) for name, path in files.items()}
            metadata = _checked(metadata)
            encode(metadata)  # else rank 0 alone would find out, when the others have saved
        except Exception as error:
            mistake = error
        told = None if mistake is None else f"{type(mistake).__qualname__}: {mistake}"
        given = None if mistake is not None else metadata  # what is wrong with it may be that it does not travel
        everybody = self._distributed.allgather((ckpt_dir is not None, listing, given, told))
        if mistake is not None:
            raise mistake
        for rank, (_, _, _, wrong) in enumerate(everybody):
            if wrong is not None:
                raise CheckpointError(f"The checkpoint was not saved because of rank {rank}: {wrong}")
        if not any(has_dir for has_dir, _, _, _ in everybody):
            raise ArgumentError("upload(None, shard=True) on all ranks: at least one of them has to give a directory.")
        owners = owners_of([one[1] for one in everybody])
        mine = {name: path for name, path in files.items() if owners[name] == self._distributed.rank}
        return mine, merge_metadata([one[2] for one in everybody])


def _checked(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    if metadata is not None and not (isinstance(metadata, Mapping) and all(isinstance(key, str) for key in metadata)):
        raise ArgumentTypeError(f"metadata is {metadata!r}; expected a dict with names as its keys.")
    return dict(metadata or {})


def _files(ckpt_dir: str | os.PathLike[str] | None, selector: Selector | None) -> dict[str, Path]:
    if ckpt_dir is None:
        return {}
    directory = Path(ckpt_dir).expanduser()
    if not directory.is_dir():
        raise ArgumentError(f"upload({os.fspath(ckpt_dir)!r}): there is no such directory.")
    return dict(_selected(directory.absolute(), selector))


def _selected(directory: Path | None, selector: Selector | None) -> Iterator[tuple[str, Path]]:
    for name, path in files_of(directory) if directory is not None else ():
        if selector is None or selector(name):
            yield name, path


def _link(files: Any, folder: Path) -> None:
    """Not copies: who saves them copies them, and who restores them reads."""
    for name, path in files:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(path)


def _copy(path: Path, target: Path) -> None:
    """Beside its place at first: another rank may read there what it has copied itself."""
    target.parent.mkdir(parents=True, exist_ok=True)
    fd, beside = tempfile.mkstemp(dir=target.parent, prefix=".paceline-")
    os.close(fd)
    try:
        shutil.copyfile(path, beside)
        os.chmod(beside, stat.S_IMODE(path.stat().st_mode) | stat.S_IWUSR)
        os.replace(beside, target)
    except BaseException:
        os.unlink(beside)
        raise


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
