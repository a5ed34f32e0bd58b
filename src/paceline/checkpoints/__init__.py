"""State at rest: what a checkpoint is made of, how it is committed, which ones are kept, and where.

Importing this loads neither torch nor NumPy nor fsspec; a value or a URL that needs one of them does.
"""

from paceline.checkpoints.checkpoint import Checkpoint, CheckpointInfo
from paceline.checkpoints.content.snapshot import Buffers, Snapshot, copy_of, snapshot
from paceline.checkpoints.reading import copy, load, read_info
from paceline.checkpoints.storage.base import Storage, open_storage
from paceline.checkpoints.store import CheckpointStore
from paceline.checkpoints.strategy import CheckpointStrategy, ranked, to_delete

__all__ = [
    "Buffers",
    "Checkpoint",
    "CheckpointInfo",
    "CheckpointStore",
    "CheckpointStrategy",
    "Snapshot",
    "Storage",
    "copy",
    "copy_of",
    "load",
    "open_storage",
    "ranked",
    "read_info",
    "snapshot",
    "to_delete",
]
