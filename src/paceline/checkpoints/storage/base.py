"""Where checkpoints are kept: the seam between what a checkpoint is and the disk or object store that holds
it.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote

from paceline.checkpoints.content.files import SourceFile
from paceline.checkpoints.storage.workspace import Workspace

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*(::|://)")
_LOCAL_URL = re.compile(r"(file|local)://")


@dataclass(frozen=True)
class Fetched:
    """Files of a checkpoint as local files below `path`. `discard` removes them if they are a copy."""

    path: Path
    discard: Callable[[], None]


class Storage(Protocol):
    """Keeps named sets of files under one root, each of them whole or not there at all.

    The last file given to `write` is the manifest; a set exists for readers once that file does. Content goes
    in as chunks of memory, because a checkpoint is larger than what one wants to hold twice, and comes out as
    local files, because that is what can be read straight into arrays. Failures are OSErrors, whatever the
    service below raises.
    """

    @property
    def root(self) -> str: ...

    def path_of(self, name: str) -> str:
        """What a user would pass to `load`."""

    def names(self) -> list[str]:
        """The entries in the root, in no order: sets of files, torn ones and foreign ones. Empty if there is
        no root.
        """

    def read(self, name: str, file: str) -> bytes:
        """One small file. FileNotFoundError if it is not there."""

    def fetch(self, name: str, files: Sequence[str]) -> Fetched: ...

    def write(self, name: str, files: Sequence[SourceFile]) -> None:
        """Commits a set of files, durably. FileExistsError if the name is taken; after any error nothing of
        it is left.
        """

    def delete(self, name: str) -> None:
        """Idempotent. A reader sees the whole set or none of it, also when this is interrupted."""

    def workspace(self) -> Workspace:
        """A local directory for files that wait for `write`; on the same disk, if the root is on one."""

    def free_bytes(self) -> int | None:
        """How much more could be written; None if there is no telling."""


def open_storage(root: str | Path) -> Storage:
    """The storage for a path (`~` and relative ones too), a `file://` URL, or any other URL that fsspec
    knows.
    """
    text = str(root)
    if _LOCAL_URL.match(text):
        text = unquote(_LOCAL_URL.sub("", text))
    elif _URL.match(text):
        from paceline.checkpoints.storage.fsspec import FsspecStorage

        return FsspecStorage(text)
    from paceline.checkpoints.storage.local import LocalStorage

    return LocalStorage(text)


def split_path(path: str | Path) -> tuple[str, str]:
    """The root and the name of a checkpoint's path or URL."""
    text = str(path).rstrip("/")
    if _URL.match(text):
        root, _, name = text.rpartition("/")
        return root, name
    absolute = Path(text or "/").expanduser().absolute()
    return str(absolute.parent), absolute.name
