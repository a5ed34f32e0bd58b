"""The driver's end of `RelayedStorage`: does on its own disk what workers ask for that do not see it."""

import errno
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from paceline.checkpoints.content.files import DiskFile
from paceline.checkpoints.manifest import MANIFEST_FILE
from paceline.checkpoints.storage import open_storage, split_path
from paceline.checkpoints.storage.landmark import Landmark
from paceline.checkpoints.storage.local import LocalStorage
from paceline.checkpoints.storage.messages import Part, append, read_message
from paceline.checkpoints.storage.workspace import Workspace

_TOKEN_FILE = ".paceline-driver"


class StorageRelay:
    """For one run. Workers may read and write in the folder of its checkpoints, and read in that of the checkpoint it
    was given; at a URL they need no help."""

    def __init__(self, checkpoint_root: str | None, given: str | None):
        self._root, self._given = checkpoint_root, given
        self._writable: LocalStorage | None = None
        self._token_path: Path | None = None
        self._uploads: dict[str, Workspace] = {}

    def begin(self) -> tuple[Landmark, ...]:
        """Prepare for the workers of a new attempt: by what they find they know whether to ask. What those before them
        have sent without an end to it is thrown away."""
        self._drop_all()
        landmarks = []
        storage = None if self._root is None else open_storage(self._root)
        if isinstance(storage, LocalStorage):
            self._writable = storage
            landmarks.append(Landmark.at(storage.root, self._put_token(storage)))
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
        storage = self._open(root, to_write=operation in ("put", "commit", "delete"))
        match operation, *arguments:
            case ("names",):
                return storage.names()
            case ("free_bytes",):
                return storage.free_bytes()
            case "read", name, file:
                return storage.read(_entry(name), _inside(file))
            case "get", name, files, offset:
                return read_message(storage.fetch(_entry(name), files).path, [_inside(file) for file in files], offset)
            case "put", upload, parts:
                return self._put(storage, upload, parts)
            case "commit", upload, name, sizes:
                return self._commit(storage, upload, _entry(name), sizes)
            case "drop", upload:
                return self._drop(upload)
            case "delete", name:
                return storage.delete(_entry(name))
        raise ValueError(f"the driver cannot {operation!r}")

    def _put(self, storage: LocalStorage, upload: str, parts: Sequence[Part]) -> None:
        if upload not in self._uploads:
            self._uploads[upload] = storage.workspace()
        append(_folder(self._uploads[upload]), [(_inside(file), data) for file, data in parts], sync=True)

    def _commit(self, storage: LocalStorage, upload: str, name: str, sizes: Mapping[str, int]) -> None:
        if upload not in self._uploads:
            raise OSError(errno.EIO, "Nothing of it has arrived", name)
        folder = _folder(self._uploads[upload])
        for file, num_bytes in sizes.items():
            if (arrived := (folder / _inside(file)).stat().st_size) != num_bytes:
                raise OSError(errno.EIO, f"Only {arrived} of {num_bytes} bytes have arrived", file)
        storage.write(name, [DiskFile(file, folder / file) for file in sizes])
        self._drop(upload)

    def _drop(self, upload: str) -> None:
        if (workspace := self._uploads.pop(upload, None)) is not None:
            workspace.close()

    def _drop_all(self) -> None:
        for upload in list(self._uploads):
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

    def _open(self, root: str, to_write: bool) -> LocalStorage:
        allowed = [] if self._writable is None else [self._writable.root]
        if not to_write and (readable := self._readable()) is not None:
            allowed.append(readable)
        wanted = os.path.normpath(root)
        if not any(f"{wanted}/".startswith(f"{os.path.normpath(folder)}/") for folder in allowed):
            raise PermissionError(errno.EACCES, "This is no folder of this run", root)
        return LocalStorage(wanted)


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
