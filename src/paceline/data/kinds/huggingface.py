"""Datasets of Hugging Face: tables by index, and streams."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from paceline.data.formats import from_batch
from paceline.data.rows import Rows, from_arrow


def _module() -> Any:
    return sys.modules.get("datasets")


class HuggingFaceSource:
    """A map-style one. Its own format or transform is respected."""

    def __init__(self, dataset: Any):
        self.dataset = dataset

    @staticmethod
    def takes(value: Any) -> bool:
        module = _module()
        return module is not None and isinstance(value, module.Dataset)

    def __len__(self) -> int:
        return len(self.dataset)

    def take(self, indices: Any) -> Rows:
        if self.dataset.format["type"] is None:
            return from_arrow(self.dataset.with_format("arrow")[indices.tolist()])
        return from_batch(self.dataset[indices.tolist()], "the dataset's transform")

    def column(self, name: str) -> Any:
        """All of it, without what a transform makes of it."""
        return from_arrow(self.dataset.select_columns([name]).with_format("arrow")[:]).columns[name]

    def column_names(self) -> list[str]:
        return list(self.dataset.column_names)

    def fingerprint(self) -> str:
        return f"{self.dataset._fingerprint} {len(self)}"

    def describe(self) -> dict[str, Any]:
        return {"kind": "huggingface", "num_rows": len(self), "columns": self.column_names()}


class HuggingFaceStreamSource:
    """An iterable one. It is told the epoch, by which it shuffles if it was asked to, and skips by itself."""

    def __init__(self, dataset: Any):
        self.dataset = dataset

    @staticmethod
    def takes(value: Any) -> bool:
        module = _module()
        return module is not None and isinstance(value, module.IterableDataset)

    def open(self, skip: int, epoch: int) -> Iterator[Any]:
        self.dataset.set_epoch(epoch)
        return iter(self.dataset.skip(skip) if skip else self.dataset)

    def column_names(self) -> list[str] | None:
        names = self.dataset.column_names
        return None if names is None else list(names)

    def fingerprint(self) -> str:
        return f"huggingface stream {self.column_names()}"

    def describe(self) -> dict[str, Any]:
        return {"kind": "huggingface iterable", "columns": self.column_names()}
