"""Where checkpoints are kept: one module a kind of place, behind the seam in `base`."""

from paceline.checkpoints.storage.base import Fetched, Storage, open_storage, split_path

__all__ = ["Fetched", "Storage", "open_storage", "split_path"]
