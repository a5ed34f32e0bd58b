"""Tensors of which prepared loaders take a batch at once: nobody sees a difference."""

import pytest
import torch
import torch._dynamo  # torch imports it at some first use and sets a variable then: not inside a test
from torch.utils.data import DataLoader, TensorDataset

from paceline.prepare import prepare_data_loader
from paceline.prepare.tensor_rows import rows_together

TENSORS = {
    "floats": torch.randn(11, 3),
    "whole numbers": torch.arange(11),
    "truths": torch.arange(11) % 2 == 0,
    "transposed": torch.randn(3, 11).t(),
    "no columns": torch.zeros(11, 0),
    "half": torch.randn(11, 2, 2).to(torch.bfloat16),
    "images, channels last": torch.randn(11, 3, 4, 4).to(memory_format=torch.channels_last),
}


def facts(batches):
    return [
        (type(batch), [(part.dtype, part.shape, part.stride(), part.tolist()) for part in batch]) for batch in batches
    ]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_are_those_of_a_plain_loader(num_workers):
    loader = DataLoader(TensorDataset(*TENSORS.values()), 4, num_workers=num_workers)
    assert rows_together(loader) is not None
    assert facts(prepare_data_loader(loader)) == facts(loader)


@pytest.mark.parametrize("name", TENSORS)
def test_every_kind_of_tensor_comes_as_it_would_alone(name):
    loader = DataLoader(TensorDataset(TENSORS[name]), 4, sampler=[3, 1, 10, 1, 0])
    assert facts(prepare_data_loader(loader)) == facts(loader)


class Doubled(TensorDataset):
    def __getitem__(self, index):
        return tuple(2 * part for part in super().__getitem__(index))


def summed(samples):
    return sum(int(sample[0]) for sample in samples)


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Doubled(torch.arange(6)), 2),
        DataLoader(TensorDataset(torch.arange(6)), 2, collate_fn=summed),
        DataLoader(TensorDataset(torch.arange(6)), batch_size=None),
        DataLoader(TensorDataset(torch.nn.Parameter(torch.ones(6, 2))), 2),
    ],
    ids=["a class of the user's", "collate_fn", "no batches", "parameter"],
)
def test_what_others_have_made_stays_theirs(loader):
    assert rows_together(loader) is None
    prepared = [str(batch) for batch in prepare_data_loader(loader)]
    assert prepared == [str(batch) for batch in loader]


def test_sparse_tensors_are_left_to_torch():
    assert rows_together(DataLoader(TensorDataset(torch.eye(6).to_sparse()), 2)) is None


def test_users_find_their_dataset_and_function():
    loader = DataLoader(TensorDataset(torch.arange(6)), 2)
    prepared = prepare_data_loader(loader)
    assert prepared.dataset is loader.dataset
    assert prepared.collate_fn is loader.collate_fn
