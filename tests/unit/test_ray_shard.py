"""A rank's stream of a Ray dataset, of which Ray only has to give the same rows again."""

import numpy as np
import pytest
import torch

from paceline.data.door import Door, RayInWorker
from paceline.data.given import Handout
from paceline.data.ray_shard import RayShard
from paceline.experiment.shards import DatasetShard
from paceline.workers.base import Place


class Stream:
    """Gives ten rows, or what Ray's local shuffle would make of them."""

    def __init__(self):
        self.seeds = []

    def iter_batches(
        self, *, batch_size, batch_format, local_shuffle_buffer_size=None, local_shuffle_seed=None, prefetch_batches=1
    ):
        ids = np.arange(10)
        if local_shuffle_buffer_size is not None:
            self.seeds.append(local_shuffle_seed)
            ids = np.random.default_rng(local_shuffle_seed).permutation(ids)
        return iter([{"id": ids[start : start + batch_size]} for start in range(0, 10, batch_size)])


def ids_of(batches):
    return [int(number) for batch in batches for number in batch["id"]]


@pytest.mark.parametrize("read", ["iter_batches", "iter_torch_batches"])
def test_local_shuffle_without_a_seed_is_the_same_after_a_failure_and_another_in_each_epoch(read):
    options = {"batch_size": 2, "local_shuffle_buffer_size": 8}
    shard = RayShard(Stream(), 0, 1, lambda: 5)
    first = ids_of(getattr(shard, read)(**options))
    batches = iter(getattr(shard, read)(**options))
    had = ids_of([next(batches), next(batches)])
    resumed = RayShard(Stream(), 0, 1, lambda: 5)
    resumed.go_on([shard.state()])
    second = [*had, *ids_of(getattr(resumed, read)(**options))]
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second


def test_local_shuffle_differs_with_the_seed_of_the_run_and_the_rank():
    orders = [
        ids_of(RayShard(Stream(), rank, 2, lambda seed=seed: seed).iter_batches(5, local_shuffle_buffer_size=8))
        for rank, seed in ((0, 1), (1, 1), (0, 2))
    ]
    assert len({tuple(order) for order in orders}) == 3


def test_own_seed_of_a_local_shuffle_is_kept():
    stream = Stream()
    list(RayShard(stream, 0, 1).iter_batches(5, local_shuffle_buffer_size=8, local_shuffle_seed=0))
    assert stream.seeds == [0]


def test_loop_that_was_left_early_is_an_epoch():
    shard = RayShard(Stream(), 0, 1)
    for _ in shard.iter_batches(5):
        assert shard.epoch == 0
        break
    assert shard.epoch == 1
    seen = [shard.epoch for _ in shard.iter_batches(5)]
    assert (seen, shard.epoch) == ([1, 1], 2)


def test_epochs_in_one_loop_go_on_after_one_that_was_left():
    shard = RayShard(Stream(), 0, 1)
    next(iter(shard.iter_batches(5, epochs=3)))
    assert len(ids_of(shard.iter_batches(5, epochs=3))) == 20
    assert not ids_of(shard.iter_batches(5, epochs=3))


def test_checkpoint_after_a_loop_that_was_left_knows_the_row():
    shard = RayShard(Stream(), 0, 1)
    next(iter(shard.iter_batches(2)))
    resumed = RayShard(Stream(), 0, 1)
    resumed.go_on([shard.state()])
    assert resumed.epoch == 0
    assert ids_of(resumed.iter_batches(2)) == list(range(2, 10))


def test_what_a_worker_cannot_do_with_a_ray_dataset_is_told():
    with pytest.raises(AttributeError, match=r"get_dataset\(\).filter: of a Ray dataset, .* before it is given to run"):
        RayInWorker(None, Stream(), None).filter(len)


class Objects(Stream):
    """What `ray.data.from_torch` gives: rows as the torch dataset has them."""

    def iter_batches(self, *, batch_size, batch_format, prefetch_batches=1):
        rows = np.empty(10, object)
        for number in range(10):
            rows[number] = (torch.tensor(float(number)), number)
        return iter([{"item": rows[start : start + batch_size]} for start in range(0, 10, batch_size)])


def test_rows_of_a_torch_dataset_come_as_they_are():
    shard = DatasetShard(RayInWorker(Door(Handout({}), Place(), lambda: 0, lambda keeper: None), Objects(), "train"))
    loader = shard.iter_torch_batches(4, collate_fn=lambda batch: [row[1] for row in batch["item"]], rest="uneven")
    assert list(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
