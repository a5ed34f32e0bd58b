"""prepare_data_loader in one process: the ranks are values handed in."""

import copy
import logging
import random
from collections import Counter
from itertools import chain, count, islice

import numpy as np
import pytest
import torch
import torch._dynamo  # torch imports it at some first use and sets a variable then: not inside a test
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from paceline import session
from paceline.errors import ArgumentError, ArgumentTypeError
from paceline.prepare import PreparedDataLoader, enable_reproducibility, prepare_data_loader
from paceline.prepare.order import Position
from paceline.prepare.scope import close_scope
from paceline.testing import make_session
from paceline.workers.base import Place


class Numbers(Dataset):
    """The dataset whose sample i is i; remembers which samples were loaded."""

    def __init__(self, size):
        self.size, self.loaded = size, []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.loaded.append(index)
        return index


class Backwards:
    """A sampler of a user's own: no base class, no randomness."""

    def __init__(self, size):
        self.size = size

    def __iter__(self):
        return iter(range(self.size - 1, -1, -1))

    def __len__(self):
        return self.size


class PythonShuffle(Backwards):
    def __iter__(self):
        indices = list(range(self.size))
        random.shuffle(indices)
        return iter(indices)


class NumpyShuffle(Backwards):
    def __iter__(self):
        return iter(np.random.permutation(self.size).tolist())


class EvenThenOdd(BatchSampler):
    """A batch sampler of a user's own: batches of unequal size."""

    def __iter__(self):
        order = list(self.sampler)
        yield from ([i for i in order if i % 4 == k] for k in range(3))

    def __len__(self):
        return 3


@pytest.fixture(autouse=True)
def _clean():
    yield
    close_scope()


@pytest.fixture
def enter(monkeypatch):
    """Make this process a worker at the given place."""

    def worker(**place):
        made = make_session(Place(**place))
        monkeypatch.setattr(session, "_current", made)

    return worker


def prepared(loader, rank=0, world_size=1, *, seed=0, is_sharded=True, device=None):
    place = Place(world_rank=rank, world_size=world_size)
    return PreparedDataLoader(loader, place=place, seed=seed, is_sharded=is_sharded, device=device)


def batches_of(loader):
    return [batch.tolist() for batch in loader]


def samples_of(loader):
    return [sample for batch in batches_of(loader) for sample in batch]


def sampler_loaders():
    data = Numbers(12)
    generator = torch.Generator().manual_seed(3)
    return {
        "sequential": DataLoader(data, batch_size=2),
        "shuffled": DataLoader(data, batch_size=2, shuffle=True),
        "shuffled by a generator": DataLoader(data, batch_size=2, shuffle=True, generator=generator),
        "backwards": DataLoader(data, batch_size=2, sampler=Backwards(12)),
        "python": DataLoader(data, batch_size=2, sampler=PythonShuffle(12)),
        "numpy": DataLoader(data, batch_size=2, sampler=NumpyShuffle(12)),
        "list": DataLoader(data, batch_size=2, sampler=list(range(12))),
        "subset": DataLoader(data, batch_size=2, sampler=SubsetRandomSampler(range(12))),
        "batch sampler": DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 2, False)),
        "one by one": DataLoader(data, batch_size=None, shuffle=True, collate_fn=lambda i: torch.tensor([i])),
    }


@pytest.mark.parametrize("kind", sampler_loaders())
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_divide_an_epoch_among_them(kind, world_size):
    ranks = [prepared(sampler_loaders()[kind], rank, world_size) for rank in range(world_size)]
    for _ in range(2):
        shares = [samples_of(loader) for loader in ranks]
        assert [len(share) for share in shares] == [12 // world_size] * world_size
        assert sorted(chain(*shares)) == list(range(12))


@pytest.mark.parametrize("kind", ["sequential", "shuffled", "backwards", "python", "numpy"])
def test_one_rank_sees_what_two_see_together(kind):
    def loader(batch_size):
        original = sampler_loaders()[kind]
        sampler = RandomSampler(original.dataset) if kind == "shuffled" else original.sampler
        return DataLoader(original.dataset, batch_size=batch_size, sampler=sampler)

    alone = batches_of(prepared(loader(4)))
    left, right = (batches_of(prepared(loader(2), rank, 2)) for rank in range(2))
    assert [sorted(batch) for batch in alone] == [sorted(a + b) for a, b in zip(left, right, strict=True)]


@pytest.mark.parametrize("size", [4, 5, 10, 11, 12])
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("drop_last", [False, True])
def test_uneven_shares_are_filled_or_cut_like_torchs_sampler(size, world_size, drop_last):
    data = Numbers(size)
    for rank in range(world_size):
        theirs = DistributedSampler(data, world_size, rank, shuffle=False, drop_last=drop_last)
        expected = batches_of(DataLoader(data, batch_size=2, sampler=theirs, drop_last=drop_last))
        ours = prepared(DataLoader(data, batch_size=2, drop_last=drop_last), rank, world_size)
        assert batches_of(ours) == expected
        assert len(ours) == len(expected)


def test_fewer_samples_than_ranks():
    filled = [samples_of(prepared(DataLoader(Numbers(2)), rank, 5)) for rank in range(5)]
    assert filled == [[0], [1], [0], [1], [0]]
    cut = prepared(DataLoader(Numbers(2), drop_last=True), 0, 5)
    assert (batches_of(cut), len(cut)) == ([], 0)


def test_shuffled_epochs_differ_and_come_again_from_the_seed():
    first, again, other = (prepared(sampler_loaders()["shuffled"], seed=seed) for seed in (1, 1, 2))
    epochs = [samples_of(first), samples_of(first)]
    assert epochs[0] != epochs[1]
    assert [samples_of(again), samples_of(again)] == epochs
    assert samples_of(other) != epochs[0]


def test_custom_samplers_order_is_kept_and_dealt_out():
    loader = DataLoader(Numbers(6), batch_size=2, sampler=Backwards(6))
    assert [samples_of(prepared(loader, rank, 2)) for rank in range(2)] == [[5, 3, 1], [4, 2, 0]]


def test_sampler_with_replacement_keeps_its_number_of_samples_and_weights():
    sampler = WeightedRandomSampler([0.0, 1.0, 0.0], num_samples=10)
    loaders = [prepared(DataLoader(Numbers(3), batch_size=5, sampler=sampler), rank, 2) for rank in range(2)]
    assert [samples_of(loader) for loader in loaders] == [[1] * 5, [1] * 5]


def test_custom_batch_samplers_batches_are_dealt_out_whole():
    loader = DataLoader(Numbers(12), batch_sampler=EvenThenOdd(SequentialSampler(range(12)), 3, False))
    whole = [[0, 4, 8], [1, 5, 9], [2, 6, 10]]
    ranks = [prepared(loader, rank, 2) for rank in range(2)]
    assert [batches_of(rank) for rank in ranks] == [[whole[0], whole[2]], [whole[1], whole[0]]]
    assert [len(rank) for rank in ranks] == [2, 2]
    assert ranks[0].batch_sampler.batch_size == 3
    cut = DataLoader(Numbers(12), batch_sampler=EvenThenOdd(SequentialSampler(range(12)), 3, True))
    assert batches_of(prepared(cut, 1, 2)) == [whole[1]]


def test_random_batch_sampler_is_the_same_on_all_ranks():
    def loader():
        return DataLoader(Numbers(12), batch_sampler=EvenThenOdd(RandomSampler(range(12)), 3, True))

    alone = batches_of(prepared(loader()))
    assert batches_of(prepared(loader(), 1, 2)) == [alone[1]]


def test_endless_sampler():
    class Endless:
        def __iter__(self):
            return count()

    loader = DataLoader(Numbers(10**9), batch_size=2, sampler=Endless())
    right = prepared(loader, 1, 2)
    assert [batch.tolist() for batch in islice(right, 3)] == [[1, 3], [5, 7], [9, 11]]
    with pytest.raises(TypeError, match="Endless"):
        len(right)


def test_order_longer_than_what_is_drawn_at_a_time():
    loaders = [prepared(DataLoader(Numbers(10_001), batch_size=100, shuffle=True), rank, 2) for rank in range(2)]
    seen = Counter(chain(*(samples_of(loader) for loader in loaders)))
    assert set(seen) == set(range(10_001))
    assert sorted(seen.values()) == [1] * 10_000 + [2]


def test_distributed_sampler_is_kept_and_told_the_epoch():
    data = Numbers(8)
    theirs = DistributedSampler(data, num_replicas=2, rank=1, shuffle=True, seed=5)
    loader = prepare_data_loader(DataLoader(data, batch_size=2, sampler=theirs))
    for epoch in range(2):
        seen = samples_of(loader)
        theirs.set_epoch(epoch)
        assert seen == list(theirs)


def test_sampler_with_a_rank_of_its_own_is_not_divided_again(enter):
    class Ranked(Backwards):
        num_replicas, rank = 2, 1

    enter(world_rank=1, world_size=2)
    assert samples_of(prepare_data_loader(DataLoader(Numbers(4), sampler=Ranked(4)))) == [3, 2, 1, 0]


def test_add_dist_sampler_false_gives_everyone_everything(enter):
    enter(world_rank=1, world_size=2)
    loader = DataLoader(Numbers(4))
    assert samples_of(prepare_data_loader(loader)) == [1, 3]
    assert samples_of(prepare_data_loader(loader, add_dist_sampler=False)) == [0, 1, 2, 3]


class TunedLoader(DataLoader):
    """A subclass whose constructor takes other arguments."""

    def __init__(self, name, size):
        super().__init__(Numbers(size), batch_size=3)
        self.name = name


def test_loader_keeps_all_that_it_has():
    original = DataLoader(
        Numbers(8),
        batch_size=2,
        num_workers=2,
        collate_fn=torch.tensor,
        pin_memory=True,
        drop_last=True,
        timeout=7,
        worker_init_fn=print,
        multiprocessing_context="forkserver",
        generator=torch.Generator(),
        prefetch_factor=5,
        persistent_workers=True,
        pin_memory_device="cuda",
        in_order=False,
    )
    before = dict(vars(original))
    loader = prepared(original, 1, 2)
    kept = {name: value for name, value in before.items() if name not in ("sampler", "batch_sampler")}
    assert {name: getattr(loader, name) for name in kept} == kept
    assert loader.multiprocessing_context is original.multiprocessing_context
    assert vars(original) == before
    assert len(loader) == 2


def test_subclass_of_data_loader_stays_one():
    loader = prepared(TunedLoader("tuned", 6), 0, 2)
    assert loader.name == "tuned"
    assert batches_of(loader) == [[0, 2, 4]]
    assert type(loader._loader) is TunedLoader


def test_attributes_of_a_custom_sampler_stay_in_reach():
    sampler = Backwards(6)
    sampler.temperature = 0.5
    loader = prepared(DataLoader(Numbers(6), sampler=sampler), 0, 2)
    assert loader.sampler.temperature == 0.5
    assert loader.batch_sampler.sampler is loader.sampler
    with pytest.raises(AttributeError, match="pressure"):
        _ = loader.sampler.pressure


def test_loop_leaves_all_generators_alone():
    generator = torch.Generator().manual_seed(1)
    loader = prepared(DataLoader(Numbers(8), shuffle=True, generator=generator))
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    before = (
        random.getstate(),
        np.random.get_state()[1].tolist(),
        torch.get_rng_state(),
        generator.get_state(),
    )
    samples_of(loader)
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])
    assert torch.equal(generator.get_state(), before[3])


def test_position_counts_what_the_loop_was_given():
    loader = prepared(DataLoader(Numbers(6), batch_size=2), 0, 1)
    seen = [loader.state_dict()]
    for _ in loader:
        seen.append(loader.state_dict())
    seen.append(loader.state_dict())
    assert seen == [{"epoch": e, "done": d} for e, d in [(0, 0), (0, 2), (0, 4), (0, 6), (1, 0)]]


@pytest.mark.parametrize("kind", sampler_loaders())
@pytest.mark.parametrize("stop", [0, 1, 2, 3])
def test_interrupted_equals_uninterrupted(kind, stop):
    unbroken = prepared(sampler_loaders()[kind], 1, 2)
    expected = [batches_of(unbroken) for _ in range(3)]

    first = prepared(sampler_loaders()[kind], 1, 2)
    batches_of(first)
    begun = [batch.tolist() for batch in islice(first, stop)]
    state = first.state_dict() if stop else {"epoch": 1, "done": 0}
    resumed = prepared(sampler_loaders()[kind], 1, 2)
    resumed.load_state_dict(copy.deepcopy(state))
    resumed.dataset.loaded.clear()
    rest = batches_of(resumed)
    assert begun + rest == expected[1]
    assert resumed.dataset.loaded == [sample for batch in rest for sample in batch]
    assert batches_of(resumed) == expected[2]


@pytest.mark.parametrize("kind", sampler_loaders())
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (2, 3), (3, 2), (4, 1)], ids=str)
def test_interrupted_epoch_goes_on_with_another_number_of_ranks(kind, sizes):
    """Every sample of the epoch once, whoever reads it; and what follows is the same epoch as ever."""
    before, after = sizes
    whole = samples_of(prepared(sampler_loaders()[kind]))
    first = [prepared(sampler_loaders()[kind], rank, before) for rank in range(before)]
    begun = [sample for loader in first for batch in islice(loader, 1) for sample in batch.tolist()]
    [state] = {tuple(loader.state_dict().items()) for loader in first}

    second = [prepared(sampler_loaders()[kind], rank, after) for rank in range(after)]
    for loader in second:
        loader.load_state_dict(dict(state))
    rest = [sample for loader in second for sample in samples_of(loader)]
    assert set(begun + rest) == set(whole), "none is left out"
    assert len(begun + rest) - len(whole) < after, "none comes twice, but to give every rank equally many"
    assert {loader.state_dict()["epoch"] for loader in second} == {1}


def test_states_of_ranks_that_were_not_in_step_leave_nothing_out():
    loader = prepared(DataLoader(Numbers(12), batch_size=2), 0, 1)
    loader.load_state_dict([{"epoch": 1, "done": 8}, {"epoch": 1, "done": 4}, {"epoch": 2, "done": 0}])
    assert loader.state_dict() == {"epoch": 1, "done": 4}


def test_order_that_is_filled_up_is_filled_from_its_start_also_when_resumed():
    unbroken = [batches_of(prepared(DataLoader(Numbers(7), batch_size=2), rank, 3)) for rank in range(3)]
    for rank in range(3):
        resumed = prepared(DataLoader(Numbers(7), batch_size=2), rank, 3)
        resumed.load_state_dict({"epoch": 0, "done": 6})
        assert batches_of(resumed) == unbroken[rank][1:]


def test_resumed_loop_may_announce_its_epoch():
    loader = prepared(DataLoader(Numbers(6), batch_size=2, shuffle=True))
    epochs = [batches_of(loader) for _ in range(4)]
    loader.load_state_dict({"epoch": 2, "done": 2})
    seen = []
    for epoch in range(2, 4):
        loader.set_epoch(epoch)
        seen.append(batches_of(loader))
    assert seen == [epochs[2][1:], epochs[3]]


@pytest.mark.parametrize("through", [lambda loader: loader, lambda loader: loader.sampler])
def test_set_epoch_starts_anywhere(through):
    loader = prepared(DataLoader(Numbers(6), batch_size=2, shuffle=True))
    epochs = [batches_of(loader) for _ in range(3)]
    through(loader).set_epoch(1)
    assert batches_of(loader) == epochs[1]
    through(loader).set_epoch(0)
    assert batches_of(loader) == epochs[0]
    assert batches_of(loader) == epochs[1]


def test_state_of_a_finished_loop_that_was_saved_in_its_last_batch():
    loader = prepared(DataLoader(Numbers(4), batch_size=2, shuffle=True))
    loader.load_state_dict({"epoch": 0, "done": 4})
    assert batches_of(loader) == []
    assert loader.state_dict() == {"epoch": 1, "done": 0}


def test_loop_that_was_left_early_is_followed_by_a_new_epoch():
    loader = prepared(DataLoader(Numbers(6), batch_size=2, shuffle=True))
    epochs = [batches_of(loader) for _ in range(2)]
    loader.set_epoch(0)
    next(iter(loader))
    assert loader.state_dict() == {"epoch": 0, "done": 2}
    assert batches_of(loader) == epochs[1]


def test_loop_that_took_nothing_costs_no_epoch():
    loader = prepared(DataLoader(Numbers(6), batch_size=2))
    loader.load_state_dict({"epoch": 3, "done": 2})
    iter(loader)
    assert batches_of(loader) == [[2, 3], [4, 5]]


def test_two_loops_at_a_time_are_both_right_and_the_later_holds_the_position():
    loader = prepared(DataLoader(Numbers(6), batch_size=2, shuffle=True))
    expected = [batches_of(loader) for _ in range(2)]
    loader.set_epoch(0)
    first = iter(loader)
    begun = [next(first).tolist()]
    second = iter(loader)
    mixed = [(next(second).tolist(), next(first).tolist()) for _ in range(2)]
    assert [mine for mine, _ in mixed] == expected[1][:2]
    assert begun + [theirs for _, theirs in mixed] == expected[0]
    assert list(first) == []
    assert loader.state_dict() == {"epoch": 1, "done": 4}


@pytest.mark.parametrize(
    ("begun", "epoch", "expected"),
    [(False, 2, (2, 5)), (False, 3, (3, 0)), (True, 2, (2, 0)), (True, 3, (3, 0))],
)
def test_announced_epoch_keeps_only_a_loaded_batch(begun, epoch, expected):
    position = Position(2, 5, begun)
    position.set_epoch(epoch)
    assert (position.epoch, position.done, position.is_begun) == (*expected, False)


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"epoch": 1},
        {"epoch": "x", "done": 0},
        None,
        [],
        {"epoch": -1, "done": 0},
        {"epoch": 0, "done": float("inf")},
        {"epoch": 0, "done": 10**20},
    ],
)
def test_state_that_is_none(state):
    with pytest.raises(ArgumentError, match=r"a loader's (state|epoch)"):
        prepared(DataLoader(Numbers(4))).load_state_dict(state)


def test_empty_batch_of_none_does_not_end_the_loop():
    loader = prepared(
        DataLoader(Numbers(4), collate_fn=lambda items: None if items == [1] else items[0]),
        device=torch.device("cpu"),
    )
    assert list(loader) == [0, None, 2, 3]
    assert loader.state_dict() == {"epoch": 1, "done": 0}


def test_batches_are_moved():
    # The meta device stands in for a GPU: tensors really move there.
    data = [{"x": torch.ones(2), "name": "a", "more": (torch.ones(1), [torch.zeros(1)])}] * 2
    meta = torch.device("meta")
    (batch,) = list(prepared(DataLoader(data, batch_size=2), device=meta))
    assert [batch["x"].device, batch["more"][0].device, batch["more"][1][0].device] == [meta] * 3
    assert batch["name"] == ["a", "a"]


class Stream(IterableDataset):
    def __init__(self, size=6):
        self.size, self.epoch = size, 0

    def __iter__(self):
        return iter(range(10 * self.epoch, 10 * self.epoch + self.size))


class StreamWithEpochs(Stream):
    def set_epoch(self, epoch):
        self.epoch = epoch


def test_iterable_dataset_is_left_to_its_author_with_one_notice(enter, caplog):
    enter(world_rank=0, world_size=2)
    with caplog.at_level(logging.WARNING):
        loaders = [prepare_data_loader(DataLoader(Stream(), batch_size=2)) for _ in range(2)]
    assert batches_of(loaders[0]) == batches_of(loaders[1]) == [[0, 1], [2, 3], [4, 5]]
    (record,) = caplog.records
    assert "Stream is an IterableDataset" in record.getMessage()
    assert "world_rank()" in record.getMessage()


def test_iterable_dataset_gives_no_notice_to_a_single_process(caplog):
    prepare_data_loader(DataLoader(Stream()))
    assert not caplog.records


def test_iterable_dataset_resumes_and_learns_its_epoch():
    loader = prepared(DataLoader(StreamWithEpochs(), batch_size=2))
    loader.load_state_dict({"epoch": 1, "done": 2})
    assert batches_of(loader) == [[14, 15]]
    assert batches_of(loader) == [[20, 21], [22, 23], [24, 25]]


def test_seed_is_that_of_enable_reproducibility_then_of_the_generator_then_zero():
    def order(generator_seed=None):
        generator = None if generator_seed is None else torch.Generator().manual_seed(generator_seed)
        return samples_of(prepare_data_loader(DataLoader(Numbers(20), shuffle=True, generator=generator)))

    unseeded, zero, seven = order(), order(0), order(7)
    assert zero != seven
    torch.manual_seed(99)
    assert (order(), order(0), order(7)) == (unseeded, zero, seven)
    enable_reproducibility(7)
    assert order() != unseeded
    assert order(0) == order(7) == seven


def test_outside_a_worker_a_loader_is_whole_and_prepared_once():
    loader = prepare_data_loader(DataLoader(TensorDataset(torch.arange(3)), batch_size=2))
    assert [batch[0].tolist() for batch in loader] == [[0, 1], [2]]
    assert len(loader) == 2
    assert prepare_data_loader(loader) is loader
    assert loader.batch_size == 2
    assert "'epoch': 1" in repr(loader)


def test_something_else_than_a_loader():
    with pytest.raises(ArgumentTypeError, match=r"type list; expected a torch.utils.data.DataLoader"):
        prepare_data_loader([1, 2])


def test_prepared_loader_can_be_copied():
    loader = prepared(DataLoader(Numbers(4), batch_size=2))
    loader.load_state_dict({"epoch": 0, "done": 2})
    assert batches_of(copy.deepcopy(loader)) == [[2, 3]]
