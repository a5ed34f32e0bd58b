"""Datasets: what a run reads, in an order that everybody knows, each row once."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from paceline import registry

if TYPE_CHECKING:
    from paceline.data.dataset import Dataset, mix
    from paceline.data.draws import sample_rng
    from paceline.data.folds import to_cv
    from paceline.data.given import Supply, resolve_dataset
    from paceline.data.making import as_dataset, from_numpy, read_csv, read_json, read_parquet
    from paceline.data.shard import Shard
    from paceline.recording.audit import audit
    from paceline.recording.row_difference import diff

_HOME_OF = {
    "Dataset": "dataset",
    "Shard": "shard",
    "Supply": "given",
    "as_dataset": "making",
    "from_numpy": "making",
    "mix": "dataset",
    "read_csv": "making",
    "read_json": "making",
    "read_parquet": "making",
    "resolve_dataset": "given",
    "sample_rng": "draws",
    "to_cv": "folds",
}

__all__ = [
    "Dataset",
    "Shard",
    "Supply",
    "as_dataset",
    "audit",
    "diff",
    "from_numpy",
    "mix",
    "read_csv",
    "read_json",
    "read_parquet",
    "resolve_dataset",
    "sample_rng",
    "to_cv",
]


def __getattr__(name: str) -> Any:
    """Numpy is imported with the first dataset, not with a Trainer."""
    if name in registry.KINDS["rows"]:  # of what a run has read: they stand above, since they know runs
        return registry.find("rows", name)
    if name not in _HOME_OF:
        raise AttributeError(f"module 'paceline.data' has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
