"""Prepared loaders with real loader processes, which load ahead of the loop."""

import random
import subprocess
import sys
from itertools import islice

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    get_worker_info,
)

from paceline.prepare import PreparedDataLoader, rng_state
from paceline.workers.base import Place


class Augmented(Dataset):
    """Sample i with noise from each of the three generators, as random transforms would add it."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.tensor([index, random.random(), np.random.rand(), torch.rand(()).item()], dtype=torch.float64)


class AugmentedWhole(Augmented):
    """Fetches a batch at a time."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class AugmentedStream(IterableDataset):
    def __iter__(self):
        worker = get_worker_info()
        for index in range(worker.id, 16, worker.num_workers):
            yield torch.tensor([index, torch.rand(()).item()], dtype=torch.float64)


def prepared(dataset=None, rank=0, world_size=1, **settings):
    settings = {"batch_size": 2, "shuffle": True, "num_workers": 2} | settings
    if "batch_sampler" in settings:
        del settings["batch_size"], settings["shuffle"]
    place = Place(world_rank=rank, world_size=world_size)
    loader = DataLoader(dataset or Augmented(), **settings)
    return PreparedDataLoader(loader, place=place, seed=1, is_sharded=True, device=None)


def batches_of(loader):
    return [batch.tolist() for batch in loader]


KINDS = {
    "plain": {},
    "by batches": {"dataset": AugmentedWhole()},
    "persistent": {"persistent_workers": True, "prefetch_factor": 3},
    "batch sampler": {"batch_sampler": BatchSampler(RandomSampler(range(16)), 2, True)},
    "started afresh": {"multiprocessing_context": "fork", "timeout": 60, "num_workers": 1},
    "stream": {"dataset": AugmentedStream(), "shuffle": None},
}


@pytest.mark.parametrize("kind", KINDS)
def test_interrupted_equals_uninterrupted_with_random_transforms(kind):
    unbroken = prepared(**KINDS[kind])
    expected = [batches_of(unbroken) for _ in range(3)]
    assert expected[0] != expected[1]
    for stop in (1, 3):
        first = prepared(**KINDS[kind])
        batches_of(first)
        begun = []
        for batch in first:
            begun.append(batch.tolist())
            if len(begun) == stop:
                state = first.state_dict()  # the loader's processes are batches ahead of this
                break
        assert state == {"epoch": 1, "done": stop if kind == "stream" else 2 * stop}
        resumed = prepared(**KINDS[kind])
        resumed.load_state_dict(state)
        assert begun + batches_of(resumed) == expected[1], f"left after {stop}"
        assert batches_of(resumed) == expected[2], f"left after {stop}"


def test_random_transforms_do_not_depend_on_the_number_of_processes():
    assert batches_of(prepared(num_workers=1)) == batches_of(prepared(num_workers=2))


def test_random_transforms_differ_between_ranks_and_samples():
    noise = [row[1:] for rank in range(2) for batch in batches_of(prepared(None, rank, 2)) for row in batch]
    assert len({value for row in noise for value in row}) == 16 * 3


def test_persistent_processes_survive_a_loop_that_was_left_early():
    loader = prepared(persistent_workers=True)
    expected = [batches_of(loader) for _ in range(2)]
    loader.set_epoch(0)
    assert [batch.tolist() for batch in islice(loader, 2)] == expected[0][:2]
    assert batches_of(loader) == expected[1]


def test_loader_whose_persistent_processes_run_already():
    loader = DataLoader(range(8), batch_size=2, num_workers=1, persistent_workers=True)
    assert len(list(loader)) == 4
    place = Place(world_rank=1, world_size=2)
    half = PreparedDataLoader(loader, place=place, seed=0, is_sharded=True, device=None)
    assert batches_of(half) == [[1, 3], [5, 7]]
    assert len(list(loader)) == 4


def test_loader_processes_leave_the_generators_of_training_alone():
    before = rng_state()
    batches_of(prepared())
    after = rng_state()
    assert after["python"] == before["python"]
    assert torch.equal(after["torch"], before["torch"])
    assert after["numpy"][1].tolist() == before["numpy"][1].tolist()


def mark(worker_id):
    get_worker_info().dataset.marked = True


class Marked(Dataset):
    marked = False

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return self.marked


def test_users_worker_init_fn_and_dataset_are_what_the_processes_see():
    assert batches_of(prepared(Marked(), worker_init_fn=mark)) == [[True, True], [True, True]]


def test_importing_the_helpers_does_not_load_torch():
    code = "import sys, paceline.prepare, paceline.prepare.scope; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
