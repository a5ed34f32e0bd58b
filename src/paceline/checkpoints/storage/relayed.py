"""Checkpoints in a folder that only the driver sees: every operation is a question to it; `StorageRelay` answers."""

import errno
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from paceline.checkpoints.content.files import SourceFile
from paceline.checkpoints.storage.base import Draft, Fetched
from paceline.checkpoints.storage.messages import append, messages
from paceline.checkpoints.storage.workspace import Workspace, temporary_workspace


class RelayedStorage:
    """A worker's half of a `Storage`, to read and to put, at the other end of `ask`, which blocks for the answer and
    raises the driver's OSErrors. Files travel in messages of some megabytes, one at a time, so that neither side has to
    hold a whole checkpoint."""

    def __init__(self, root: str, ask: Callable[[Any], Any]):
        self._root, self._question = root, ask

    @property
    def root(self) -> str:
        return self._root

    def path_of(self, name: str) -> str:
        return f"{self._root}/{name}"

    def claim(self) -> None:
        raise PermissionError(errno.EACCES, "The driver claims the folder, not a worker", self._root)

    def names(self) -> list[str]:
        names: list[str] = self._ask("names")
        return names

    def read(self, name: str, file: str) -> bytes:
        data: bytes = self._ask("read", name, file)
        return data

    def fetch(self, source: str | Draft, files: Sequence[str]) -> Fetched:
        workspace = self.workspace()
        try:
            folder, offset = workspace.path / "fetched", 0
            while files:
                pieces, num_done, offset = self._ask("get", source, files, offset)
                append(folder, pieces)
                files = files[num_done:]
        except BaseException:
            workspace.close()
            raise
        return Fetched(folder, workspace.close)

    def put(self, draft: Draft, files: Sequence[SourceFile]) -> None:
        upload = secrets.token_hex(8)
        sizes: Counter[str] = Counter()
        try:
            for pieces in messages(files):
                for file, data in pieces:
                    sizes[file] += len(data)
                self._ask("send", upload, pieces)
            self._ask("put", upload, draft, dict(sizes))
        except Exception:  # anything else ends this worker's call, and the driver then drops it by itself
            with suppress(Exception):
                self._ask("drop", upload)
            raise

    def folder_of(self, draft: Draft) -> str:
        return ""

    def commit(self, draft: Draft, manifest: SourceFile, files: Sequence[str]) -> None:
        raise PermissionError(errno.EACCES, "The driver commits, not a worker", draft.name)

    def discard(self, draft: Draft) -> None:
        raise PermissionError(errno.EACCES, "The driver decides what is dropped, not a worker", draft.name)

    def sweep(self) -> None:
        """That is the driver's."""

    def delete(self, name: str) -> None:
        raise PermissionError(errno.EACCES, "The driver deletes, not a worker", name)

    def workspace(self) -> Workspace:
        return temporary_workspace()

    def free_bytes(self) -> int | None:
        free_bytes: int | None = self._ask("free_bytes")
        return free_bytes

    def _ask(self, operation: str, *arguments: Any) -> Any:
        return self._question((operation, self._root, *arguments))
