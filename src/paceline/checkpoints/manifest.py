"""`checkpoint.json`: the last file of a checkpoint to be written, whose presence says that the checkpoint is
whole.
"""

import errno
import json
import math
import os
import zlib
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Any

from paceline.checkpoints.checkpoint import CheckpointInfo
from paceline.checkpoints.content.files import FileRecord
from paceline.errors import CheckpointDamagedError, CheckpointError
from paceline.regular_files import UnreadableFileError

MANIFEST_FILE = "checkpoint.json"
FORMAT_VERSION = 2
_MOST_RANKS = 1_000_000
_READABLE = (1, 2)  # version 1 had one writer, and nothing of a rank's own


@dataclass(frozen=True)
class Manifest:
    """`ranks` are those of the `world_size` ranks whose part is in it. `folder` is where in the checkpoint the files
    lie, apart from what writers of other attempts may have put there; empty where these have a place of their own."""

    id: int
    time: float
    score: float | None
    iteration: int
    files: tuple[FileRecord, ...]
    world_size: int = 1
    ranks: tuple[int, ...] = (0,)
    folder: str = ""

    def place(self, name: str) -> str:
        """Where the files are that belong to the checkpoint of this name."""
        return f"{name}/{self.folder}" if self.folder else name

    @property
    def num_bytes(self) -> int:
        return sum(record.num_bytes for record in self.files)

    def info(self, path: str) -> CheckpointInfo:
        return CheckpointInfo(
            self.id, path, self.score, self.iteration, self.time, self.num_bytes, self.world_size, self.ranks
        )

    def check(self) -> None:
        """ValueError for what no writer of ours has written."""
        if not 1 <= self.world_size <= _MOST_RANKS or not all(0 <= rank < self.world_size for rank in self.ranks):
            raise ValueError(f"there cannot be the ranks {self.ranks[:8]} of {self.world_size}")
        if not math.isfinite(self.time) or self.iteration < 0:
            raise ValueError(f"it cannot have been saved at {self.time}, after {self.iteration} reports")
        if self.folder and (not _is_inside(self.folder) or "/" in self.folder):
            raise ValueError(f"its files cannot be in a folder {self.folder!r}")

    def to_bytes(self) -> bytes:
        body = {
            "format": "paceline.checkpoint",
            "version": FORMAT_VERSION,
            "num_bytes": self.num_bytes,
            **asdict(self),
        }
        body["score"] = None if self.score is None else repr(self.score)  # JSON has no nan
        return (json.dumps(body | {"crc32": _crc32(body)}, indent=1) + "\n").encode()

    @classmethod
    def from_bytes(cls, data: bytes, path: str) -> "Manifest":
        """`path` is the checkpoint's, for the error: CheckpointDamagedError, unless a newer Paceline wrote
        it.
        """
        try:
            body = json.loads(data)
            crc32 = body.pop("crc32")
            if body["format"] != "paceline.checkpoint" or crc32 != _crc32(body):
                raise ValueError("its checksum does not match its content")
            version = body["version"]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise damaged(path, MANIFEST_FILE, f"it is not a manifest ({error})") from error
        if version not in _READABLE:
            raise CheckpointError(
                f"{path} has format version {version!r}, this Paceline reads versions up to {FORMAT_VERSION}: "
                "load it with the Paceline that wrote it, or a newer one."
            )
        return cls._from_body(body, path)

    @classmethod
    def _from_body(cls, body: dict[str, Any], path: str) -> "Manifest":
        try:
            files = tuple(FileRecord(str(f["name"]), int(f["num_bytes"]), int(f["crc32"])) for f in body["files"])
            score = None if body["score"] is None else float(body["score"])
            world_size, ranks = int(body.get("world_size", 1)), tuple(map(int, body.get("ranks", [0])))
            manifest = cls(
                int(body["id"]),
                float(body["time"]),
                score,
                int(body["iteration"]),
                files,
                world_size,
                ranks,
                str(body.get("folder", "")),
            )
            manifest.check()
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise damaged(path, MANIFEST_FILE, f"a field is missing or wrong ({error!r})") from error
        for record in files:
            if not _is_inside(record.name):
                # these names become paths on this machine, and must not lead out of the checkpoint
                raise damaged(path, MANIFEST_FILE, f"it names the file {record.name!r}, outside of the checkpoint")
        return manifest


def _is_inside(name: str) -> bool:
    """Whether it can be the name of a file in the checkpoint."""
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return False
    parts = PurePosixPath(name).parts
    return bool(parts) and ".." not in parts and not name.startswith("/") and "\0" not in name


def damaged(path: str, file: str, reason: str) -> CheckpointDamagedError:
    return CheckpointDamagedError(
        f"The checkpoint {path} is damaged: {file}: {reason}. "
        "Load another checkpoint of the run; this one can be deleted."
    )


def unreadable(path: str, error: UnreadableFileError) -> CheckpointError:
    """For a file of the checkpoint that is there, and not as we have written it, or not for this user to read."""
    file = os.path.basename(error.filename)
    if error.errno in (errno.EACCES, errno.EPERM):
        return CheckpointError(f"The checkpoint {path} cannot be read: {file}: {error.strerror}.")
    return damaged(path, file, str(error.strerror))


def _crc32(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())
