"""gather_for_metrics in one process: what the ranks give is put together as it is in a group."""

from collections import namedtuple

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from paceline import session
from paceline.errors import ArgumentError, ArgumentTypeError, TrainerStateError
from paceline.prepare import gather_for_metrics, prepare_data_loader
from paceline.prepare.loader import PreparedDataLoader
from paceline.prepare.metrics import _joined, _start_of
from paceline.prepare.scope import close_scope, current_scope
from paceline.testing import make_session
from paceline.workers.base import Place


@pytest.fixture(autouse=True)
def _clean():
    yield
    close_scope()


def ranks_of(loader, world_size, start=0, is_sharded=True):
    """The same loader as every rank has it, at that position."""
    places = [Place(world_rank=rank, world_size=world_size) for rank in range(world_size)]
    made = [PreparedDataLoader(loader, place=place, seed=0, is_sharded=is_sharded, device=None) for place in places]
    for one in made:
        one.load_state_dict({"epoch": 0, "done": start})
    return made


def joined(parts):
    progress = current_scope().progress
    starts = {_start_of(part, progress) for part in parts}
    assert len(starts) == 1, "every rank decides alike"
    return _joined(parts, starts.pop(), progress).tolist()


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_each_sample_comes_once_and_in_order(world_size, drop_last):
    for size in (1, 2, 5, 6, 7, 12):
        for batch_size in (1, 2, 5):
            for start in {0, *range(0, size, world_size * batch_size)} - {size}:
                loader = DataLoader(range(size), batch_size=batch_size, drop_last=drop_last)
                ranks = ranks_of(loader, world_size, start)
                seen, given = [], [[] for _ in ranks]
                for batches in zip(*ranks, strict=True):
                    seen += joined(list(batches))
                    for mine, batch in zip(given, batches, strict=True):
                        mine += batch.tolist()
                num_seen = size - start
                if drop_last:
                    num_seen -= num_seen % (world_size * batch_size)
                expected = list(range(start, start + num_seen))
                assert seen == expected
                assert not seen or joined([torch.tensor(mine) for mine in given]) == expected, "after the loop, at once"


def test_order_without_a_length():
    class Endlessly:
        def __iter__(self):
            return iter(range(7))

    ranks = ranks_of(DataLoader(range(7), batch_size=2, sampler=Endlessly()), 2)
    assert [joined(list(batches)) for batches in zip(*ranks, strict=True)] == [[0, 1, 2, 3], [4, 5, 6]]


def test_whole_batches_of_a_batch_sampler():
    loader = DataLoader(range(5), batch_sampler=type("Own", (BatchSampler,), {})(SequentialSampler(range(5)), 2, False))
    assert [joined(list(batches)) for batches in zip(*ranks_of(loader, 2), strict=True)] == [[0, 1, 2, 3], [4]]
    with pytest.raises(TrainerStateError, match="Gather each batch there"):
        joined([torch.arange(3), torch.arange(4)])


def test_data_that_was_not_shared_out_comes_rank_by_rank():
    ranks = ranks_of(DataLoader(range(3), batch_size=2), 2, is_sharded=False)
    assert [joined(list(batches)) for batches in zip(*ranks, strict=True)] == [[0, 1, 0, 1], [2, 2]]
    assert joined([torch.arange(3), torch.arange(5)]) == [0, 1, 2, 0, 1, 2, 3, 4]


def test_two_loops_at_a_time():
    loaders = [ranks_of(DataLoader(range(size), batch_size=2), 2) for size in (3, 9)]
    short, long = (zip(*ranks, strict=True) for ranks in loaders)
    seen = [joined(list(next(loop))) for loop in (long, short, long, long)]
    assert seen == [[0, 1, 2, 3], [0, 1, 2], [4, 5, 6, 7], [8]]


def test_alone_it_returns_the_rows_of_this_process_in_what_holds_them():
    Pair = namedtuple("Pair", "first second")
    weight = torch.ones(2, requires_grad=True)
    value = {"loss": weight.sum(), "rows": [weight * 2, None], "pair": Pair(weight, (weight,))}
    gathered = gather_for_metrics(value)
    assert gathered["loss"].tolist() == [2.0]
    assert gathered["rows"][0].tolist() == [2.0, 2.0]
    assert gathered["rows"][1] is None
    assert type(gathered["pair"]) is Pair
    assert not gathered["pair"].first.requires_grad


def test_rows_that_are_not_the_samples():
    assert gather_for_metrics(torch.arange(3)).tolist() == [0, 1, 2], "no prepared loader was looped over"
    for batch in prepare_data_loader(DataLoader(range(10), batch_size=4)):
        assert torch.equal(gather_for_metrics(batch), batch)
        with pytest.raises(ArgumentError, match=rf"shape \(11, 2\).*: {len(batch)} in the latest batch, or \d+ since"):
            gather_for_metrics(torch.zeros(11, 2))
    assert gather_for_metrics(torch.arange(10)).tolist() == list(range(10))
    assert gather_for_metrics(torch.tensor(1)).tolist() == [1]
    with pytest.raises(ArgumentError, match=r"shape \(2,\).*: 10 since it began.*Prepare the loader"):
        gather_for_metrics(torch.arange(2))


def test_loop_that_is_left_early_is_over():
    for _ in prepare_data_loader(DataLoader(range(10), batch_size=2)):
        break
    assert gather_for_metrics(torch.arange(2)).tolist() == [0, 1]
    with pytest.raises(ArgumentError, match="2 since it began"):
        gather_for_metrics(torch.arange(4))


@pytest.mark.parametrize("part", [1.5, "a", object()])
def test_something_else_than_tensors(part):
    with pytest.raises(ArgumentTypeError, match="expected tensors, or containers of tensors"):
        gather_for_metrics({"a": torch.ones(1), "b": [part]})


def test_ranks_without_a_process_group(monkeypatch):
    monkeypatch.setattr(session, "_current", make_session(Place(world_rank=1, world_size=2)))
    with pytest.raises(TrainerStateError, match=r"of 2 workers, but they form no process group.*backend='torch'"):
        gather_for_metrics(torch.ones(1))
