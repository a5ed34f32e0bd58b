"""The driver's end of `RelayedStorage`: does on its own disk what workers ask for that do not see it."""

import errno
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from paceline.checkpoints.content.files import DiskFile, MemoryFile
from paceline.checkpoints.manifest import MANIFEST_FILE
from paceline.checkpoints.storage.base import Draft, Storage, open_storage, split_path
from paceline.checkpoints.storage.landmark import Landmark
from paceline.checkpoints.storage.local import LocalStorage
from paceline.checkpoints.storage.memory import MemoryStorage
from paceline.checkpoints.storage.messages import Piece, append, read_message
from paceline.checkpoints.storage.workspace import Workspace

_TOKEN_FILE = ".paceline-driver"
_Ours = LocalStorage | MemoryStorage


class StorageRelay:
    """For one run. Workers may read, and put drafts, in the folder of its checkpoints or in memory, and read in the
    folder of the checkpoint it was given; at a URL they need no help."""

    def __init__(self, storage: Storage, given: str | None):
        self._storage, self._given = storage, given
        self._token_path: Path | None = None
        self._uploads: dict[str, Workspace] = {}
        self._in_memory: dict[str, dict[str, list[bytes]]] = {}

    def begin(self) -> tuple[Landmark, ...]:
        """Prepare for the workers of a new attempt: by what they find they know whether to ask. What those before them
        have sent without an end to it is thrown away."""
        self._drop_all()
        landmarks = []
        if isinstance(self._storage, LocalStorage):
            landmarks.append(Landmark.at(self._storage.root, self._put_token(self._storage)))
        elif isinstance(self._storage, MemoryStorage):
            landmarks.append(Landmark(self._storage.root, "", None))  # nobody else sees our memory
        if (readable := self._readable()) is not None:
            landmarks.append(Landmark.at(readable, f"{self._given}/{MANIFEST_FILE}"))
        return tuple(landmarks)

    def answer(self, request: tuple[Any, ...]) -> Any:
        """Do as asked. What goes wrong is the answer too: it is to be raised where the question was put."""
        try:
            return self._do(*request)
        except Exception as error:
            return error

    def close(self) -> None:
        """Leave nothing but checkpoints behind. Idempotent."""
        self._drop_all()
        if self._token_path is not None:
            with suppress(OSError):
                self._token_path.unlink()
            self._token_path = None

    def _do(self, operation: str, root: str, *arguments: Any) -> Any:
        storage = self._open(root, to_write=operation in ("send", "put"))
        match operation, *arguments:
            case ("names",):
                return storage.names()
            case ("free_bytes",):
                return storage.free_bytes()
            case "read", name, file:
                return storage.read(_entry(name), _inside(file))
            case "get", source, files, offset:
                return self._get(storage, source, [_inside(file) for file in files], offset)
            case "send", upload, pieces:
                return self._receive(storage, upload, pieces)
            case "put", upload, draft, sizes:
                return self._put(storage, upload, draft, sizes)
            case "drop", upload:
                return self._drop(upload)
        raise ValueError(f"the driver cannot {operation!r}")

    def _get(self, storage: _Ours, source: str | Draft, files: Sequence[str], offset: int) -> Any:
        for name in (source.name, source.token) if isinstance(source, Draft) else source.split("/"):
            _entry(name)
        return read_message(partial(storage.read_range, source), files, offset)

    def _receive(self, storage: _Ours, upload: str, pieces: Sequence[Piece]) -> None:
        if isinstance(storage, MemoryStorage):
            arrived = self._in_memory.setdefault(upload, {})
            for file, data in pieces:
                arrived.setdefault(_inside(file), []).append(data)
            return
        if upload not in self._uploads:
            self._uploads[upload] = storage.workspace()
        append(_folder(self._uploads[upload]), [(_inside(file), data) for file, data in pieces], sync=True)

    def _put(self, storage: _Ours, upload: str, draft: Draft, sizes: Mapping[str, int]) -> None:
        draft = Draft(_entry(draft.name), _entry(draft.token))
        if isinstance(storage, MemoryStorage):
            arrived = self._in_memory.pop(upload, {})
            storage.put(draft, [MemoryFile(file, arrived[file]) for file in sizes])
            return
        if upload not in self._uploads:
            raise OSError(errno.EIO, "Nothing of it has arrived", draft.name)
        folder = _folder(self._uploads[upload])
        for file, num_bytes in sizes.items():
            if (size := (folder / _inside(file)).stat().st_size) != num_bytes:
                raise OSError(errno.EIO, f"Only {size} of {num_bytes} bytes have arrived", file)
        storage.put(draft, [DiskFile(file, folder / file) for file in sizes])
        self._drop(upload)

    def _drop(self, upload: str) -> None:
        self._in_memory.pop(upload, None)
        if (workspace := self._uploads.pop(upload, None)) is not None:
            workspace.close()

    def _drop_all(self) -> None:
        for upload in [*self._uploads, *self._in_memory]:
            self._drop(upload)

    def _put_token(self, storage: LocalStorage) -> Path:
        """Not made anew with each attempt: over a network, a new one may be seen late. A folder that refuses it gets
        none, and then no worker finds it."""
        if self._token_path is None:
            self._token_path = Path(storage.root, _TOKEN_FILE)
            with suppress(OSError):
                storage.make_root()
                self._token_path.write_text(secrets.token_hex(16))
        return self._token_path

    def _readable(self) -> str | None:
        if self._given is None:
            return None
        storage = open_storage(split_path(self._given)[0])
        return storage.root if isinstance(storage, LocalStorage) else None

    def _open(self, root: str, to_write: bool) -> _Ours:
        wanted = os.path.normpath(root)
        if isinstance(self._storage, MemoryStorage) and wanted == os.path.normpath(self._storage.root):
            return self._storage
        if isinstance(self._storage, LocalStorage) and _is_below(wanted, self._storage.root):
            return LocalStorage(wanted)
        readable = None if to_write else self._readable()
        if readable is not None and _is_below(wanted, readable):
            return LocalStorage(wanted)
        raise PermissionError(errno.EACCES, "This is no folder of this run", root)


def _is_below(path: str, folder: str) -> bool:
    return f"{path}/".startswith(f"{os.path.normpath(folder)}/")


def _folder(workspace: Workspace) -> Path:
    """For the files that arrive, apart from the workspace's own."""
    return workspace.path / "arrived"


def _entry(name: str) -> str:
    """Refuses what is not the name of something in the root."""
    if name in ("", ".", "..") or "/" in name:
        raise PermissionError(errno.EACCES, "This is no name of a checkpoint", name)
    return name


def _inside(file: str) -> str:
    """Refuses what leads out of the checkpoint."""
    if file.startswith("/") or ".." in PurePosixPath(file).parts:
        raise PermissionError(errno.EACCES, "This file is outside of the checkpoint", file)
    return file
