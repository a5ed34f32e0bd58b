"""Datasets that are cut into shards, one for each rank of a run."""

import sys
from typing import Any

from paceline import registry
from paceline.data.base import Source
from paceline.errors import ArgumentTypeError

__all__ = ["Source", "resolve_dataset"]


def resolve_dataset(dataset: Any) -> Source | None:
    """Turn what the user gave, a dataset or a dict of them, into a source of shards."""
    if dataset is None:
        return None
    datasets = dataset if isinstance(dataset, dict) else {None: dataset}
    ray_data = sys.modules.get("ray.data")  # whoever has one of its datasets has imported it
    for name, one in datasets.items():
        if ray_data is None or not isinstance(one, ray_data.Dataset):
            which = "dataset" if name is None else f"dataset[{name!r}]"
            raise ArgumentTypeError(
                f"{which} is a {type(one).__module__}.{type(one).__qualname__}; expected a ray.data.Dataset, or a dict "
                "of them. Other data is opened in the training function."
            )
    made: Source = registry.find("dataset", "ray")(datasets)
    return made
