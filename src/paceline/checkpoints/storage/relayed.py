"""Checkpoints in a folder that only the driver sees: every operation is a question to it; `StorageRelay` answers."""

import secrets
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.checkpoints.content.files import SourceFile
from paceline.checkpoints.storage.base import Fetched
from paceline.checkpoints.storage.messages import append, messages
from paceline.checkpoints.storage.workspace import Workspace, sweep


class RelayedStorage:
    """A `Storage` at the other end of `ask`, which blocks for the answer and raises the driver's OSErrors. Files travel
    in messages of some megabytes, one at a time, so that neither side has to hold a whole checkpoint."""

    def __init__(self, root: str, ask: Callable[[Any], Any]):
        self._root, self._question = root, ask

    @property
    def root(self) -> str:
        return self._root

    def path_of(self, name: str) -> str:
        return f"{self._root}/{name}"

    def names(self) -> list[str]:
        names: list[str] = self._ask("names")
        return names

    def read(self, name: str, file: str) -> bytes:
        data: bytes = self._ask("read", name, file)
        return data

    def fetch(self, name: str, files: Sequence[str]) -> Fetched:
        workspace = self.workspace()
        try:
            folder, offset = workspace.path / name, 0
            while files:
                parts, num_done, offset = self._ask("get", name, files, offset)
                append(folder, parts)
                files = files[num_done:]
        except BaseException:
            workspace.close()
            raise
        return Fetched(folder, workspace.close)

    def write(self, name: str, files: Sequence[SourceFile]) -> None:
        upload = secrets.token_hex(8)
        sizes: Counter[str] = Counter()
        try:
            for parts in messages(files):
                for file, data in parts:
                    sizes[file] += len(data)
                self._ask("put", upload, parts)
            self._ask("commit", upload, name, dict(sizes))
        except Exception:  # anything else ends this worker's call, and the driver then drops it by itself
            with suppress(Exception):
                self._ask("drop", upload)
            raise

    def delete(self, name: str) -> None:
        self._ask("delete", name)

    def workspace(self) -> Workspace:
        parent = Path(tempfile.gettempdir())
        sweep(parent)
        return Workspace(parent)

    def free_bytes(self) -> int | None:
        free_bytes: int | None = self._ask("free_bytes")
        return free_bytes

    def _ask(self, operation: str, *arguments: Any) -> Any:
        return self._question((operation, self._root, *arguments))
