import pytest

from paceline.recording.gather import Gather


def report(**metrics):
    return metrics


def test_a_step_is_complete_when_every_rank_has_reported():
    gather = Gather(2)
    assert gather.add(0, report(n=0)) is None
    assert gather.add(0, report(n=1)) is None
    assert gather.add(1, report(n=10)) == [{"n": 0}, {"n": 10}]
    assert gather.add(1, report(n=11)) == [{"n": 1}, {"n": 11}]


def test_one_rank_makes_steps_alone():
    gather = Gather(1)
    assert [gather.add(0, report(n=n)) for n in range(3)] == [[{"n": 0}], [{"n": 1}], [{"n": 2}]]


def test_rank_ends_with_fewer_reports():
    gather = Gather(3)
    for rank, count in enumerate((2, 3, 2)):
        for _ in range(count):
            gather.add(rank, report())
    assert gather.mismatch() is None, "nobody has ended yet: the others may catch up"
    gather.end(0)
    mismatch = gather.mismatch()
    assert mismatch is not None
    assert mismatch.counts == (2, 3, 2)
    assert "rank 0 ended after 2" in str(mismatch)
    assert "rank 1 has made 3" in str(mismatch)


def test_rank_that_is_behind_is_no_mismatch_while_it_runs():
    gather = Gather(2)
    gather.add(0, report())
    gather.end(0)
    assert gather.mismatch() is None
    gather.add(1, report())
    gather.end(1)
    assert gather.mismatch() is None


def test_rank_does_not_report():
    gather = Gather(2)
    gather.add(0, report())
    gather.end(1)
    assert "rank 1 ended after 0" in str(gather.mismatch())


@pytest.mark.parametrize("world_size", [1, 2, 64])
def test_steps_keep_rank_order(world_size):
    gather = Gather(world_size)
    steps = [gather.add(rank, report(rank=rank)) for rank in reversed(range(world_size))]
    assert steps[:-1] == [None] * (world_size - 1)
    assert [item["rank"] for item in steps[-1]] == list(range(world_size))


def test_mismatch_is_known_whoever_ended_last():
    gather = Gather(2)
    for rank in (0, 1, 1):
        gather.add(rank, {})
    gather.end(0)
    gather.end(1)
    assert "rank 0 ended after 1" in str(gather.mismatch())
