"""Where checkpoints are kept: the seam between what a checkpoint is and the disk or object store that holds it."""

import os
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
class Draft:
    """A set of files that is not there yet. `token` tells the writers of one attempt from those of another, who may
    still be at it: a machine that counts as lost can go on writing for a while."""

    name: str
    token: str


@dataclass(frozen=True)
class Fetched:
    """Files of a checkpoint as local files below `path`. `discard` removes them if they are a copy."""

    path: Path
    discard: Callable[[], None]


class Storage(Protocol):
    """Keeps named sets of files under one root, each of them whole or not there at all.

    A set comes about in two phases, because many write it and one decides: every writer puts its files into a draft,
    which readers do not see; then one process commits the draft with a manifest that names all of them. Content goes
    in as chunks of memory, because a checkpoint is larger than what one wants to hold twice, and comes out as local
    files, because that is what can be read straight into arrays. Failures are OSErrors, whatever the service below
    raises.
    """

    @property
    def root(self) -> str: ...

    def path_of(self, name: str) -> str:
        """What a user would pass to `load`."""

    def claim(self) -> None:
        """Take the root for a run that begins. FileExistsError if there is something: it is another run's. Behind a
        URL, two that do this at the very same moment may both get it."""

    def names(self) -> list[str]:
        """The entries in the root, in no order: sets of files, and foreign ones; behind a URL torn sets too. Empty if
        there is no root."""

    def read(self, name: str, file: str) -> bytes:
        """One small file. FileNotFoundError if it is not there, UnreadableFileError for what is no file."""

    def fetch(self, source: "str | Draft", files: Sequence[str]) -> Fetched:
        """Files of a set, or of a folder in it (`name/folder`), or of a draft by whoever knows that they are in it:
        those stay good when it is committed."""

    def put(self, draft: Draft, files: Sequence[SourceFile]) -> None:
        """Phase one: adds files to a draft, durably. Writers of one draft use different names. After any error none
        of these files is left. That the draft is dropped or committed meanwhile is no error."""

    def folder_of(self, draft: Draft) -> str:
        """The folder, in the set that the draft becomes, in which its files will be; empty for the set itself."""

    def commit(self, draft: Draft, manifest: SourceFile, files: Sequence[str]) -> None:
        """Phase two, once, when `files` have been put: from now on the set exists for readers, also after a power cut.
        FileExistsError if the name is taken, FileNotFoundError if one of the files is not there."""

    def discard(self, draft: Draft) -> None:
        """Drop what was put and will not be committed. Idempotent."""

    def sweep(self) -> None:
        """Drop the drafts of writers before us, as far as they can be told from those of a living one."""

    def delete(self, name: str) -> None:
        """Idempotent. A reader sees the whole set or none of it, also when this is interrupted."""

    def workspace(self) -> Workspace:
        """A local directory for files that wait for `put`; on the same disk, if the root is on one."""

    def free_bytes(self) -> int | None:
        """How much more could be written; None if there is no telling."""


def open_storage(root: str | Path) -> Storage:
    """The storage for a path (`~` and relative ones too), a `file://` URL, or any other URL that fsspec knows."""
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
    absolute = Path(os.path.expanduser(text or "/")).absolute()
    return str(absolute.parent), absolute.name
