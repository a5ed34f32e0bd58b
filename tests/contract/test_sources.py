"""One suite for every kind of dataset that Paceline knows: what `Source` promises holds for each."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from paceline import registry
from paceline.data import resolve_dataset
from paceline.workers.base import Place, WorkerInfo


@dataclass
class Kit:
    """How the suite makes a dataset of the numbers below `num_rows`, and reads a shard of it: one rank may have to wait
    for the others. A new kind of dataset adds its own to `KITS`."""

    dataset: Callable[[int], Any]
    rows: Callable[[Any], list[int]]


def ray_dataset(num_rows):
    import ray.data

    ray.data.DataContext.get_current().enable_progress_bars = False
    return ray.data.range(num_rows, override_num_blocks=2)


def ray_rows(shard):
    return [int(number) for batch in shard.iter_batches() for number in batch["id"]]


KITS = {"ray": Kit(ray_dataset, ray_rows)}


@pytest.fixture(params=registry.names("dataset"))
def name(request):
    assert request.param in KITS, f"the dataset {request.param!r} is not under contract: add it to KITS in {__file__}"
    return request.param


@pytest.fixture
def kit(name):
    return KITS[name]


@pytest.fixture
def source_of(kit):
    """Makes sources, and closes them."""
    made = []

    def source_of(dataset):
        made.append(resolve_dataset(dataset))
        return made[-1]

    yield source_of
    for source in made:
        source.close()


def workers(size):
    return [WorkerInfo(Place(rank, rank, 0, size, size), 0, "here") for rank in range(size)]


def read(kit, shards):
    """All shards at once, as ranks do."""
    with ThreadPoolExecutor(len(shards)) as ranks:
        return list(ranks.map(kit.rows, shards))


def test_source_is_the_one_that_the_registry_names(name, kit, source_of):
    source = source_of(kit.dataset(4))
    assert type(source) is registry.find("dataset", name)
    assert source.engine in registry.names("engine")


@pytest.mark.parametrize(("num_rows", "size"), [(12, 1), (12, 2), (13, 3)])
def test_every_rank_has_equally_many_rows_that_no_other_has(kit, source_of, num_rows, size):
    shards = source_of(kit.dataset(num_rows)).cut(workers(size))
    assert len(shards) == size
    found = read(kit, shards)
    assert [len(rows) for rows in found] == [num_rows // size] * size
    together = [number for rows in found for number in rows]
    assert len(set(together)) == len(together), "no row twice"
    assert set(together) <= set(range(num_rows))


def test_cutting_again_ends_the_former_shards(kit, source_of):
    source = source_of(kit.dataset(12))
    former = source.cut(workers(1))
    shards = source.cut(workers(2))
    with pytest.raises(Exception, match=r".+"):
        kit.rows(former[0])
    assert sorted(number for rows in read(kit, shards) for number in rows) == list(range(12))


def test_close_ends_the_shards_and_is_idempotent(kit, source_of):
    source = source_of(kit.dataset(12))
    source.close()
    [shard] = source.cut(workers(1))
    source.close()
    source.close()
    with pytest.raises(Exception, match=r".+"):
        kit.rows(shard)
    [shard] = source.cut(workers(1))
    assert sorted(kit.rows(shard)) == list(range(12)), "and it may be cut again"


def test_description_is_for_the_run_folder(kit, source_of):
    one = source_of(kit.dataset(4)).describe()
    several = source_of({"train": kit.dataset(4), "valid": kit.dataset(2)}).describe()
    assert json.loads(json.dumps([one, several], allow_nan=False)) == [one, several]
    assert one
    assert sorted(several) == ["train", "valid"]
