"""Checkpoints behind a URL, with fsspec: `s3://…`, `gs://…`, `abfs://…`, `memory://…`, whatever has a file
system for it.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import PurePosixPath
from typing import Any

import fsspec

from paceline.checkpoints.content.files import MemoryFile, SourceFile
from paceline.checkpoints.manifest import MANIFEST_FILE
from paceline.checkpoints.storage.base import Draft, Fetched
from paceline.checkpoints.storage.workspace import Workspace, temporary_workspace
from paceline.errors import ArgumentError, MissingDependencyError

logger = logging.getLogger(__name__)

_PACKAGES = {
    "s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs",
    "abfs": "adlfs", "abfss": "adlfs", "az": "adlfs", "adl": "adlfs",
    "hdfs": "pyarrow", "http": "aiohttp", "https": "aiohttp", "sftp": "paramiko", "ssh": "paramiko",
}  # fmt: skip

# They have no folders to make; asked for one, they would make the bucket, which may be a typing mistake.
_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az"}

_CLAIM_FILE = ".paceline-run"


class FsspecStorage:
    """A `Storage` at a URL. Objects cannot be renamed there: a draft is a folder in the set that it becomes, named
    after the attempt, and is committed by the manifest of the set, uploaded last.

    Credentials and addresses come from the environment, where every process of a run finds them: what the
    service's own tools read (for S3: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_PROFILE, AWS_ENDPOINT_URL
    …), or fsspec's variables for the options of a file system, such as
    FSSPEC_S3_ENDPOINT_URL=http://host:port or FSSPEC_S3='{"anon": true}', or fsspec's files in
    ~/.config/fsspec.

    Writers of different attempts, or that use different names, never touch each other's files. Of two that commit one
    set, the later one gets FileExistsError; should both do it at the same moment, the later manifest names its own
    files.
    """

    def __init__(self, url: str):
        self._url = url.rstrip("/")

    @property
    def root(self) -> str:
        return self._url

    def path_of(self, name: str) -> str:
        return f"{self._url}/{name}"

    def claim(self) -> None:
        if self.names():
            raise FileExistsError(f"{self._url} is in use")
        with _as_os_errors(self._url):
            fs, root = self._open()
            _upload(fs, f"{root}/{_CLAIM_FILE}", MemoryFile(_CLAIM_FILE, [b"A run keeps its checkpoints here.\n"]))

    def names(self) -> list[str]:
        with _as_os_errors(self._url):
            fs, root = self._open()
            try:
                return [PurePosixPath(entry["name"]).name for entry in fs.ls(root, detail=True)]
            except (FileNotFoundError, NotADirectoryError):
                return []

    def read(self, name: str, file: str) -> bytes:
        with _as_os_errors(self.path_of(name)):
            fs, root = self._open()
            data: bytes = fs.cat_file(f"{root}/{name}/{file}")
            return data

    def fetch(self, source: str | Draft, files: Sequence[str]) -> Fetched:
        name = f"{source.name}/{source.token}" if isinstance(source, Draft) else source
        workspace = self.workspace()
        try:
            with _as_os_errors(self.path_of(name)):
                fs, root = self._open()
                for file in files:
                    target = workspace.path / "fetched" / file
                    target.parent.mkdir(parents=True, exist_ok=True)
                    fs.get_file(f"{root}/{name}/{file}", str(target))
        except BaseException:
            workspace.close()
            raise
        return Fetched(workspace.path / "fetched", workspace.close)

    def put(self, draft: Draft, files: Sequence[SourceFile]) -> None:
        with _as_os_errors(self.path_of(draft.name)):
            fs, root = self._open()
            folder = f"{root}/{draft.name}/{draft.token}"
            if self._is_committed(fs, root, draft.name):
                if not fs.exists(folder) or any(fs.exists(f"{folder}/{file.name}") for file in files):
                    raise FileExistsError(f"{self.path_of(draft.name)} exists already")
                return  # it was committed without these, and so nobody will ask for them
            try:
                for file in files:
                    _upload(fs, f"{folder}/{file.name}", file)
            except BaseException:
                _remove(fs, [f"{folder}/{file.name}" for file in files])
                raise

    def folder_of(self, draft: Draft) -> str:
        return draft.token

    def commit(self, draft: Draft, manifest: SourceFile, files: Sequence[str]) -> None:
        with _as_os_errors(self.path_of(draft.name)):
            fs, root = self._open()
            if self._is_committed(fs, root, draft.name):
                raise FileExistsError(f"{self.path_of(draft.name)} exists already")
            within = f"/{draft.name}/{draft.token}/"
            present = {str(path).rpartition(within)[2] for path in fs.find(f"{root}{within}")}
            for file in files:
                if file not in present:
                    raise FileNotFoundError(f"{self.path_of(draft.name)}/{draft.token}/{file} is not there")
            # not with a conditional request: few services know them, and one that is repeated after
            # a lost answer would take our own manifest for someone else's
            fs.pipe_file(f"{root}/{draft.name}/{manifest.name}", b"".join(manifest.chunks()))

    def discard(self, draft: Draft) -> None:
        with _as_os_errors(self.path_of(draft.name)):
            fs, root = self._open()
            folder = f"{root}/{draft.name}/{draft.token}"
            if fs.exists(folder) and not self._is_committed(fs, root, draft.name):
                fs.rm(folder, recursive=True)
                if _has_folders(fs):
                    with suppress(OSError):  # another attempt may be writing there
                        fs.rmdir(f"{root}/{draft.name}")

    def sweep(self) -> None:
        """Nothing: a torn set is seen by nobody, and finding it costs a request for each checkpoint."""

    def delete(self, name: str) -> None:
        with _as_os_errors(self.path_of(name)):
            fs, root = self._open()
            try:
                fs.rm_file(f"{root}/{name}/{MANIFEST_FILE}")  # from here on, it does not exist for readers
            except FileNotFoundError:
                logger.debug("%s has no manifest", self.path_of(name))
            fs.invalidate_cache()
            if fs.exists(f"{root}/{name}"):
                fs.rm(f"{root}/{name}", recursive=True)

    def workspace(self) -> Workspace:
        return temporary_workspace()

    def free_bytes(self) -> int | None:
        return None

    def _open(self) -> tuple[Any, str]:
        # Not kept: fsspec has its own cache of file systems, which unlike ours would be right after a fork.
        protocol = self._url.partition(":")[0]
        try:
            fs, root = fsspec.core.url_to_fs(self._url)
        except ImportError as error:
            package = _PACKAGES.get(protocol, getattr(error, "name", None) or protocol)
            raise MissingFileSystemError(package, package, f"Storage at {self._url}") from error
        except ValueError as error:
            raise ArgumentError(
                f"{self._url!r} is not a place where checkpoints can go: {error}. "
                "Give a path, or a URL that fsspec knows, such as s3://bucket/folder."
            ) from error
        fs.invalidate_cache()  # other processes write here too
        return fs, str(root).rstrip("/")

    @staticmethod
    def _is_committed(fs: Any, root: str, name: str) -> bool:
        fs.invalidate_cache()
        return bool(fs.exists(f"{root}/{name}/{MANIFEST_FILE}"))


class MissingFileSystemError(MissingDependencyError):
    """The packages for file systems are the user's choice, and so no extra of ours: the line to run names the
    package.
    """

    def __str__(self) -> str:
        return (
            f"{self.needed_for} needs the package '{self.package}', which is not installed. "
            f"Install it with: pip install {self.package}"
        )


def _has_folders(fs: Any) -> bool:
    protocols = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
    return not protocols & _OBJECT_STORES


def _remove(fs: Any, paths: Sequence[str]) -> None:
    try:
        for path in paths:
            if fs.exists(path):
                fs.rm_file(path)
    except Exception:
        return  # the error that led here is the one to report; without a manifest, nobody sees the rest


def _upload(fs: Any, path: str, file: SourceFile) -> None:
    if _has_folders(fs):
        fs.makedirs(path.rpartition("/")[0], exist_ok=True)
    with fs.open(path, "wb") as target:
        for chunk in file.chunks():
            target.write(chunk)


@contextmanager
def _as_os_errors(path: str) -> Iterator[None]:
    """The clients of object stores have exception classes of their own; our callers see OSErrors only."""
    try:
        yield
    except (OSError, ImportError, ArgumentError):
        raise
    except Exception as error:
        raise OSError(f"{path}: {type(error).__name__}: {error}") from error
