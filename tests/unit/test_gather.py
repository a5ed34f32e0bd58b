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


def test_rank_0_alone_may_report():
    gather = Gather(3)
    gather.add(0, report(n=0))
    gather.add(0, report(n=1))
    assert gather.end(1) == [], "rank 2 may only be slow"
    assert gather.end(2) == [[{"n": 0}, None, None], [{"n": 1}, None, None]]
    assert gather.add(0, report(n=2)) == [{"n": 2}, None, None]
    gather.end(0)
    assert gather.mismatch() is None


def test_rank_0_has_to_report_if_anybody_does():
    gather = Gather(2)
    gather.end(0)
    gather.add(1, report())
    assert "rank 0 ended after 0 report(s), while rank 1 has made 1" in str(gather.mismatch())


def test_ranks_that_are_waited_for_are_mute_until_they_report():
    gather = Gather(3)
    assert gather.mute == []
    gather.add(2, report())
    assert gather.mute == [], "nobody waits for rank 1 as long as rank 0 has not reported either"
    gather.add(0, report())
    assert gather.mute == [1]
    assert gather.excuse([1]) == [[{}, None, {}]]
    assert gather.mute == []


def test_excused_rank_reports_after_all():
    gather = Gather(2)
    gather.add(0, report(n=0))
    gather.add(0, report(n=1))
    assert len(gather.excuse([1])) == 2
    assert gather.add(1, report(n=10)) == [None, {"n": 10}], "late, and for the folder alone"
    assert gather.add(0, report(n=2)) == [{"n": 2}, None], "it is still behind"
    assert gather.add(1, report(n=11)) == [None, {"n": 11}]
    assert gather.add(1, report(n=12)) == [None, {"n": 12}]
    assert gather.add(1, report(n=13)) is None, "ahead, and from now on waited for"
    assert gather.add(0, report(n=3)) == [{"n": 3}, {"n": 13}]
    assert gather.add(0, report(n=4)) is None
    assert gather.counts == [5, 4]
    gather.end(1)
    assert "rank 1 ended after 4" in str(gather.mismatch())


def test_reports_that_nobody_has_matched_are_left_over():
    gather = Gather(2)
    for n in range(3):
        gather.add(0, report(n=n))
    gather.add(1, report(n=10))
    assert gather.leftovers() == [[{"n": 1}, None], [{"n": 2}, None]]


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
