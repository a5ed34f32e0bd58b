"""Tensors of which a batch is taken at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset, default_collate


class TensorRows(TensorDataset):
    """A TensorDataset that gives all rows of a batch together. That is what collating them one by one comes to, for
    which torch takes longer than a small model for its step."""

    def __getitems__(self, indices: Iterable[int]) -> list[torch.Tensor]:
        rows = torch.tensor([*indices], dtype=torch.int64)
        return [tensor.index_select(0, rows.to(tensor.device)) for tensor in self.tensors]


def as_it_is(batch: Any) -> Any:
    return batch


def rows_together(loader: DataLoader[Any]) -> TensorRows | None:
    """The loader's dataset in this form, if nobody would see a difference. What others have made of a dataset or of
    collating is theirs."""
    dataset = loader.dataset
    if type(dataset) is not TensorDataset or loader.batch_sampler is None or loader.collate_fn is not default_collate:
        return None
    is_plain = all(type(one) is torch.Tensor and one.layout is torch.strided for one in dataset.tensors)
    if not is_plain or any(one.is_quantized or one.requires_grad for one in dataset.tensors):
        return None
    return TensorRows(*dataset.tensors)
