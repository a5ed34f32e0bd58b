"""What a checkpoint is to its users: a dict they get back, and a line about it in a listing."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class Checkpoint(dict[str, Any]):
    """The values that were given to `save_checkpoint`, by name. It is a dict, and prints as one.

    `path` is where it was loaded from (None: it was never on disk). `directory` holds the user's own files,
    if it was saved with any. For a local checkpoint that is the checkpoint's own folder: read there, copy
    before changing anything. For a remote one it is a download that is removed when this process ends.
    """

    def __init__(self, state: Mapping[str, Any] = {}, *, path: str | None = None, directory: Path | None = None):
        super().__init__(state)
        self.path = path
        self.directory = directory


@dataclass(frozen=True)
class CheckpointInfo:
    """A committed checkpoint, without its content.

    `score` is the value of the strategy's score attribute when it was saved, None when ranked by time alone.
    `iteration` is the number of reports before it, `time` when it was saved (seconds since the epoch).
    """

    id: int
    path: str
    score: float | None
    iteration: int
    time: float
    num_bytes: int
