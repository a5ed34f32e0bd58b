"""Which saves make a checkpoint: values in, cuts out, without a process. `counts` are the reports by rank."""

import random
import sys
from dataclasses import replace
from itertools import pairwise

import pytest

from paceline.checkpoints.content.files import FileRecord
from paceline.checkpoints.part import Part
from paceline.recording.ledger import MOST_WAITING, PROOF_S, SILENCE_S, Ledger, SaveMismatch


def part(id, rank, iteration=0, own=False, time=0.0):
    shared = (FileRecord("state.json", 1, 1),) if rank == 0 else ()
    return Part(id, rank, iteration, time, shared + ((FileRecord(f"ranks/{rank}/state.json", 1, 1),) if own else ()))


def ranks_of(cuts):
    return {cut.id: [part.rank for part in cut.parts] for cut in cuts}


def add(ledger, *parts):
    for one in parts:
        ledger.add(one)


# All ranks save.


def test_checkpoint_counts_with_the_last_of_its_parts():
    ledger = Ledger(3, 1)
    for rank in (2, 0):
        ledger.add(part(1, rank, 5))
        assert ledger.take_complete([5, 5, 5]) == []
    ledger.add(part(1, 1, 5))
    [cut] = ledger.take_complete([5, 5, 5])
    assert (cut.id, [one.rank for one in cut.parts]) == (1, [0, 1, 2])
    assert ledger.take_complete([5, 5, 5]) == [], "once"
    assert ledger.savers == {0, 1, 2}


def test_rank_that_is_behind_holds_back_what_the_others_have_saved():
    ledger = Ledger(2, 1)
    add(ledger, part(1, 1, 1), part(1, 0, 1), part(2, 0, 2), part(3, 0, 3))
    assert ranks_of(ledger.take_complete([3, 1])) == {1: [0, 1]}
    assert ledger.take_complete([4, 3]) == [], "it saves, as one knows by now: its reports do not stand for it"
    add(ledger, part(2, 1, 2), part(3, 1, 3))
    assert ranks_of(ledger.take_complete([4, 3])) == {2: [0, 1], 3: [0, 1]}


def test_ids_go_on_from_the_attempt_before():
    ledger = Ledger(2, first_id=7, first_iteration=30)
    add(ledger, part(7, 0, 32), part(7, 1, 32))
    assert ranks_of(ledger.take_complete([2, 2])) == {7: [0, 1]}
    assert ledger.mismatch() is None


def test_one_rank_alone():
    ledger = Ledger(1, 1)
    ledger.add(part(1, 0))
    assert ranks_of(ledger.take_complete([0])) == {1: [0]}
    assert not ledger.is_waiting


# Only rank 0 saves.


def test_only_rank_0_saves_and_the_others_have_reported_further():
    ledger = Ledger(3, 1, first_iteration=10)
    ledger.add(part(1, 0, 12))
    assert ledger.is_waiting
    for counts in ([2, 0, 0], [2, 2, 2], [3, 3, 3], [4, 4, 3]):
        assert ledger.take_complete(counts) == [], "one step further is not enough: they may be about to save"
    assert ledger.take_complete([4, 4, 4], [4, 4, 3]) == [], "a save before the last report may be on its way"
    assert ranks_of(ledger.take_complete([4, 4, 4])) == {1: [0]}
    assert not ledger.is_waiting
    ledger.add(part(2, 0, 20))
    assert ledger.take_complete([10, 10, 9]) == [], "not all reports before it are there"
    assert ranks_of(ledger.take_complete([10, 10, 10])) == {2: [0]}, "known once, known for the attempt"


def test_only_rank_0_saves_and_the_others_have_ended():
    ledger = Ledger(3, 1)
    ledger.end(1)
    add(ledger, part(1, 0), part(2, 0))
    assert ledger.take_complete([0, 0, 0]) == []
    ledger.end(2)
    assert ranks_of(ledger.take_complete([0, 0, 0])) == {1: [0], 2: [0]}
    assert ledger.mismatch() is None
    assert ledger.savers == {0}


def test_nobody_reports_and_only_rank_0_saves():
    ledger = Ledger(2, 1)
    add(ledger, part(1, 0), part(2, 0))
    assert ledger.take_complete([0, 0]) == []
    assert ranks_of(ledger.take_salvage([0, 0])) == {1: [0], 2: [0]}


@pytest.mark.parametrize("num_reports", [0, 9])
def test_rank_0_alone_saves_for_a_while_and_the_others_do_not_even_report(num_reports):
    ledger = Ledger(2, 1)
    add(ledger, part(1, 0, num_reports))
    assert ledger.take_complete([num_reports, 0], saving_s=0.99 * SILENCE_S) == []
    assert ranks_of(ledger.take_complete([num_reports, 0], saving_s=SILENCE_S)) == {1: [0]}
    assert ledger.mute == {1}


@pytest.mark.parametrize("num_reports", [0, 4])
def test_collectives_show_that_the_others_have_passed_the_first_save(num_reports):
    ledger = Ledger(2, 1)
    ledger.add(replace(part(1, 0, 2), num_collectives=10))
    assert not ledger.is_proven
    ledger.add(replace(part(2, 0, 4), num_collectives=12))
    assert ledger.is_proven
    assert ledger.take_complete([4, num_reports], [0, 0]) == [], "something may be on its way"
    assert ranks_of(ledger.take_complete([4, num_reports], [0, 0], proven_s=PROOF_S)) == {1: [0], 2: [0]}


def test_rank_that_reports_has_to_have_reported_whatever_collectives_show():
    ledger = Ledger(2, 1)
    add(ledger, replace(part(1, 0, 2), num_collectives=10), replace(part(2, 0, 4), num_collectives=20))
    assert ranks_of(ledger.take_complete([4, 3], [0, 0], proven_s=PROOF_S)) == {1: [0]}


def test_what_was_mute_in_the_attempt_before_is_not_waited_for():
    ledger = Ledger(2, 5, first_iteration=9, abstainers=[1])
    add(ledger, part(5, 0, 12))
    assert ranks_of(ledger.take_complete([3, 0])) == {5: [0]}
    add(ledger, part(6, 0, 14))
    assert ledger.take_complete([5, 1]) == [], "now it reports: then up to there, too"
    ledger.add(part(6, 1, 14))
    assert ledger.mute == frozenset(), "and saves"
    assert ranks_of(ledger.take_complete([5, 5])) == {6: [0, 1]}


@pytest.mark.parametrize(("former_savers", "num_reports"), [([1], 0), ([], 1)])
def test_rank_that_was_heard_of_is_waited_for(former_savers, num_reports):
    ledger = Ledger(2, 1, former_savers=former_savers)
    add(ledger, part(1, 0, 5), part(2, 0, 9))
    assert ledger.take_complete([9, num_reports], saving_s=10 * SILENCE_S) == []


def test_only_so_many_wait_for_a_slow_rank():
    ledger = Ledger(2, 1)
    ledger.add(part(1, 1))
    add(ledger, *[part(id, 0) for id in range(1, MOST_WAITING + 4)])
    assert ledger.take_lost() == [], "nobody may be behind: we have only not listened"
    ledger.give_up_excess()
    assert ledger.take_lost() == [2, 4, 6], "the oldest and the newest stay, and some between them"
    assert ledger.find(4) == (5, {0: part(5, 0)}), "who has saved it finds something newer"
    newest = MOST_WAITING + 3
    add(ledger, *[part(id, 1) for id in range(2, newest + 1)])
    assert list(ranks_of(ledger.take_complete([0, 0]))) == [id for id in range(1, newest + 1) if id not in (2, 4, 6)]
    assert ledger.take_lost() == [2, 4, 6], "and what came too late for them"
    assert ledger.mismatch() is None


def test_those_that_wait_are_spread_evenly():
    ledger = Ledger(2, 1)
    ledger.add(part(1, 1, own=True))
    for id in range(1, 1000):
        ledger.add(part(id, 0))
        ledger.give_up_excess()
    ledger.take_lost()
    waiting = [id for id in range(1, 1000) if not ledger.is_given_up(id)]
    assert len(waiting) == MOST_WAITING
    assert max(after - before for before, after in pairwise(waiting)) <= 300, waiting


def test_what_takes_no_room_may_wait():
    """Rank 1, with nothing to write, is far ahead of rank 0."""
    ledger = Ledger(2, 1)
    add(ledger, *[part(id, 1) for id in range(1, 100)])
    for id in range(1, 50):
        ledger.give_up_excess()
        ledger.add(part(id, 0))
        assert ranks_of(ledger.take_complete([0, 0])) == {id: [0, 1]}


def test_who_has_something_of_its_own_finds_no_checkpoint_without_it():
    ledger = Ledger(2, 1)
    add(ledger, part(1, 1, own=True), part(1, 0), part(2, 0))
    ledger.fail(1, 1)
    assert ledger.find(1, rank=0) == (2, {0: part(2, 0)})
    assert ledger.find(1, rank=1) is None
    ledger.add(part(2, 1, own=True))
    assert ledger.find(1, rank=1)[0] == 2


@pytest.mark.parametrize("own", [False, True])
def test_ranks_that_leave_at_different_steps(own):
    ledger = Ledger(2, 1)
    add(ledger, part(1, 0, 10, own), part(1, 1, 10, own))
    assert ranks_of(ledger.take_complete([12, 20])) == {1: [0, 1]}
    ledger.leave()
    add(ledger, part(2, 0, 12, own), part(2, 1, 20, own))
    assert ranks_of(ledger.take_complete([12, 20])) == ({} if own else {2: [0, 1]}), "what is of two steps is no cut"
    assert ledger.take_lost() == ([2] if own else [])


def test_rank_that_always_saves_one_report_later_is_at_the_same_step():
    ledger = Ledger(2, 1)
    add(ledger, part(1, 0, 9, own=True), part(1, 1, 10, own=True))
    assert ranks_of(ledger.take_complete([12, 20])) == {1: [0, 1]}
    ledger.leave()
    add(ledger, part(2, 0, 11, own=True), part(2, 1, 12, own=True))
    assert ranks_of(ledger.take_complete([12, 20])) == {2: [0, 1]}


def test_rank_that_reports_more_while_it_leaves_may_still_save():
    ledger = Ledger(2, 1)
    ledger.leave()
    ledger.add(part(1, 0, 3))
    assert ledger.take_complete([3, 9]) == []
    ledger.end(1)
    assert ranks_of(ledger.take_complete([3, 9])) == {1: [0]}


def test_rank_0_may_be_the_slow_one():
    ledger = Ledger(2, 1)
    add(ledger, *[part(id, 1, own=True) for id in range(1, 100)])
    ledger.give_up_excess()
    assert len(ledger.take_lost()) == 99 - MOST_WAITING


def test_nobody_reports_and_all_save():
    ledger = Ledger(2, 1)
    add(ledger, part(1, 0), part(1, 1))
    assert ranks_of(ledger.take_complete([0, 0])) == {1: [0, 1]}


def test_late_part_of_a_rank_that_seemed_not_to_save_is_left_out_and_later_ones_need_it():
    ledger = Ledger(2, 1)
    ledger.add(part(1, 0, 1))
    assert ranks_of(ledger.take_complete([3, 3])) == {1: [0]}
    ledger.begin(1, 1)
    assert ledger.is_too_late(part(1, 1, 3))
    ledger.add(part(1, 1, 3))
    assert ledger.take_lost() == [1], "what it has put"
    assert ledger.take_complete([3, 3]) == []
    assert ledger.find(1) is None
    assert not ledger.is_hopeful()
    ledger.add(part(2, 0, 4))
    assert ledger.take_complete([9, 9]) == []
    ledger.add(part(2, 1, 4))
    assert ranks_of(ledger.take_complete([9, 9])) == {2: [0, 1]}


def test_some_ranks_save():
    ledger = Ledger(3, 1)
    add(ledger, part(1, 0, 1), part(1, 2, 1, own=True))
    assert ledger.take_complete([1, 1, 1]) == []
    assert ranks_of(ledger.take_complete([1, 3, 1])) == {1: [0, 2]}
    assert ledger.savers == {0, 2}


# A part fails.


@pytest.mark.parametrize("rank", [0, 1])
def test_failed_part_gives_up_its_checkpoint_and_no_later_one(rank):
    ledger = Ledger(2, 1)
    for one in (0, 1):
        ledger.begin(one, 1)
    ledger.add(part(1, 1 - rank, 1, own=True))
    ledger.fail(rank, 1)
    assert ledger.failed.keys() == {1}
    assert not ledger.is_hopeful()
    assert ledger.take_complete([1, 1]) == []
    add(ledger, part(2, 0, 2), part(2, 1, 2))
    assert ranks_of(ledger.take_complete([2, 2])) == {2: [0, 1]}
    assert ledger.take_lost() == [1]
    assert ledger.take_lost() == []
    assert ledger.mismatch() is None


def test_part_that_fails_before_it_was_announced_is_not_awaited():
    ledger = Ledger(1, 1)
    ledger.fail(0, 1)
    ledger.begin(0, 1)
    assert not ledger.is_hopeful()


def test_part_that_is_there_before_it_was_announced_is_not_awaited():
    ledger = Ledger(2, 1)
    ledger.add(part(1, 0))
    ledger.begin(0, 1)
    assert not ledger.is_hopeful()


def test_what_was_overtaken_is_lost_once():
    ledger = Ledger(2, 1)
    add(ledger, part(1, 0), part(2, 0), part(3, 0), part(3, 1))
    ledger.begin(1, 1)
    assert ledger.take_lost() == [], "nothing is lost as long as it can come"
    assert ranks_of(ledger.take_complete([0, 0])) == {3: [0, 1]}
    assert ledger.take_lost() == [1, 2]
    assert ledger.find(1) is None


def test_parts_can_be_found_until_they_are_taken():
    ledger = Ledger(2, 1)
    ledger.add(part(1, 0))
    assert ledger.find(1) == (1, {0: part(1, 0)})
    ledger.add(part(1, 1))
    ledger.take_complete([0, 0])
    assert ledger.find(1) is None


# The attempt is over, and rank 1 is gone without its part.


def saved_by_rank_0_alone(iteration, own=False, **arguments):
    """Two checkpoints by both; then rank 0 saves a third one."""
    ledger = Ledger(2, 1, **arguments)
    add(ledger, part(1, 0, 1, own), part(1, 1, 1, own), part(2, 0, 2, own), part(2, 1, 2, own))
    assert len(ledger.take_complete([2, 2])) == 2
    ledger.add(part(3, 0, iteration, own))
    return ledger


def test_rank_had_come_so_far_and_nobody_has_anything_of_its_own():
    assert ranks_of(saved_by_rank_0_alone(3).take_salvage([3, 3])) == {3: [0]}


def test_rank_was_behind():
    assert saved_by_rank_0_alone(3).take_salvage([3, 2]) == []


def test_rank_that_has_never_saved_may_have_something_of_its_own():
    ledger = Ledger(2, 1)
    add(ledger, part(1, 0, 1))
    assert ledger.take_salvage([1, 1]) == []
    assert ranks_of(ledger.take_salvage([1, 2])) == {1: [0]}, "it has passed the moment at which it would have saved"


def test_rank_that_reports_and_has_not_saved_for_a_while():
    ledger = Ledger(2, 1)
    add(ledger, part(1, 0, 1), part(2, 0, 2))
    assert ledger.take_complete([2, 2], saving_s=0.99 * SILENCE_S) == []
    assert ranks_of(ledger.take_complete([2, 2], saving_s=SILENCE_S)) == {1: [0], 2: [0]}


def test_rank_had_come_so_far_since_an_earlier_attempt():
    ledger = Ledger(2, 4, first_iteration=10, former_savers=[0, 1])
    add(ledger, part(4, 0, 12))
    assert ledger.take_salvage([2, 1]) == []
    assert ranks_of(ledger.take_salvage([2, 2])) == {4: [0]}


def test_there_is_something_of_a_ranks_own():
    assert saved_by_rank_0_alone(3, own=True).take_salvage([3, 3]) == []


def test_part_of_another_rank_has_something_of_its_own():
    ledger = Ledger(3, 1)
    add(ledger, part(1, 0, 1), part(1, 1, 1, own=True))
    assert ledger.take_salvage([1, 1, 1]) == []


@pytest.mark.parametrize("end", ["dies", "fails"])
def test_only_the_lost_rank_had_something_of_its_own(end):
    ledger = Ledger(2, 1)
    ledger.add(part(1, 0, 1))
    ledger.begin(1, 1)
    if end == "fails":
        ledger.fail(1, 1)
    assert ledger.take_salvage([1, 1]) == []


def test_lost_rank_had_something_of_its_own_earlier():
    ledger = Ledger(2, 1)
    add(ledger, part(1, 0, 1), part(1, 1, 1, own=True))
    assert len(ledger.take_complete([1, 1])) == 1
    ledger.add(part(2, 0, 2))
    assert ledger.take_salvage([2, 2]) == []


def test_rank_0_was_lost_before_it_had_saved():
    ledger = Ledger(2, 1)
    ledger.add(part(1, 1, 1))
    assert ledger.take_salvage([1, 1]) == []


def test_silent_rank_is_one_that_does_not_save_if_nobody_reports():
    ledger = Ledger(2, 1, first_iteration=3)
    ledger.add(part(1, 0, iteration=3, own=True))
    assert ranks_of(ledger.take_salvage([0, 0])) == {1: [0]}


def test_silent_rank_is_behind_if_rank_0_reports():
    ledger = Ledger(2, 1)
    ledger.add(part(1, 0, iteration=1))
    assert ledger.take_salvage([1, 0]) == []


def test_silent_rank_that_has_saved_in_a_former_attempt_is_missed():
    ledger = Ledger(2, 1, former_savers=[1])
    ledger.add(part(1, 0, own=True))
    assert ledger.take_salvage([0, 0]) == []


def test_rank_that_is_known_not_to_save_is_not_missed():
    ledger = Ledger(3, 1)
    ledger.end(1)
    ledger.add(part(1, 0, 1, own=True))
    assert ledger.take_complete([1, 0, 1]) == []
    assert ledger.take_salvage([1, 0, 1]) == [], "rank 2 could have been about to save"
    assert ranks_of(ledger.take_salvage([1, 0, 3])) == {1: [0]}


def test_salvage_may_skip_one():
    ledger = saved_by_rank_0_alone(3, own=True)
    add(ledger, part(4, 0, 4), part(4, 1, 4))
    assert ranks_of(ledger.take_salvage([4, 4])) == {4: [0, 1]}
    assert ledger.take_lost() == [3]


# Whether to wait.


def test_hope():
    ledger = Ledger(2, 1)
    assert not ledger.is_hopeful()
    add(ledger, part(1, 0), part(1, 1))
    ledger.take_complete([0, 0])
    ledger.begin(0, 2)
    assert not ledger.is_hopeful(), "of rank 1, which saves, nothing is on its way"
    ledger.begin(1, 2)
    assert ledger.is_hopeful()
    assert not ledger.is_hopeful(gone=[1])
    assert not ledger.is_hopeful(gone=[0])
    ledger.add(part(2, 1))
    assert ledger.is_hopeful(gone=[1]), "its part is there"
    assert not ledger.is_hopeful(gone=[0])
    ledger.add(part(2, 0))
    assert not ledger.is_hopeful(), "it is there"


def test_something_waits_until_it_is_taken():
    ledger = Ledger(2, 1)
    assert not ledger.is_waiting
    add(ledger, part(1, 0), part(1, 1))
    assert ledger.is_waiting
    ledger.take_complete([0, 0])
    assert not ledger.is_waiting


def test_at_the_end_all_that_is_left_is_dropped():
    ledger = Ledger(2, 1)
    ledger.add(part(1, 0, 5))
    ledger.begin(1, 2)
    assert ledger.take_rest() == [1, 2]
    assert ledger.take_rest() == []


# Unequal saves.


def test_ranks_do_not_save_equally_often():
    ledger = Ledger(3, first_id=5)
    add(ledger, *(part(id, rank) for rank in (0, 2) for id in (5, 6)))
    ledger.end(1)
    assert ledger.mismatch() is None, "who does not save at all need not"
    ledger.end(2)
    assert ledger.mismatch() is None
    ledger.begin(0, 7)
    mismatch = ledger.mismatch()
    assert mismatch == SaveMismatch(counts=(3, 0, 2), ended=(1, 2))
    assert "rank 2 ended after 2 save(s), while rank 0 has made 3 so far" in str(mismatch)
    assert "or on rank 0 alone" in str(mismatch)


def test_rank_0_ends_without_a_save():
    ledger = Ledger(2, 1)
    ledger.add(part(1, 1))
    ledger.end(0)
    assert ledger.mismatch() == SaveMismatch((0, 1), (0,))


def test_rank_ends_with_more_saves_than_rank_0_has_yet():
    ledger = Ledger(2, 1)
    add(ledger, part(1, 1), part(2, 1))
    ledger.end(1)
    assert ledger.mismatch() is None
    add(ledger, part(1, 0), part(2, 0))
    ledger.end(0)
    assert ledger.mismatch() is None


def test_failed_save_is_one():
    ledger = Ledger(2, 1)
    ledger.fail(0, 1)
    ledger.add(part(1, 1))
    for rank in (0, 1):
        ledger.end(rank)
    assert ledger.mismatch() is None


# What it costs.


def num_calls(fn):
    """Calls of Python and C functions, which are the same each time."""
    count = 0

    def profile(frame, event, arg):
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        fn()
    finally:
        sys.setprofile(before)
    return count


def all_save(world_size):
    ledger, counts = Ledger(world_size, 1), [0] * world_size
    for id in (1, 2, 3):
        for rank in range(world_size):
            ledger.begin(rank, id)
            ledger.add(part(id, rank, own=True))
            cuts = ledger.take_complete(counts)
            ledger.mismatch()
    assert len(cuts[0].parts) == world_size


def rank_0_saves(world_size):
    ledger, counts = Ledger(world_size, 1), [0] * world_size
    num_cuts = 0
    for id in (1, 2, 3):
        ledger.add(part(id, 0, id - 1))
        num_cuts += len(ledger.take_complete(counts))
        for rank in range(world_size):
            counts[rank] += 2
        num_cuts += len(ledger.take_complete(counts))
    assert num_cuts == 3


@pytest.mark.parametrize("run", [all_save, rank_0_saves])
def test_cost_grows_with_the_number_of_ranks_and_not_with_its_square(run):
    costs = {world_size: num_calls(lambda size=world_size: run(size)) for world_size in (1, 4, 16, 64, 256)}
    assert costs[256] < 4.5 * costs[64] < 4.5 * 4.5 * costs[16], costs


# Whatever happens.


class World:
    """Ranks that run the same loop: report, and save after every k-th report. Some may not save at all; some have
    something of their own; a part may fail. `streams` is what each of them sends."""

    def __init__(self, chance):
        self.chance = chance
        self.size, self.every, self.num_steps = chance.randint(1, 5), chance.randint(1, 3), chance.randint(1, 8)
        self.first_id, self.first_iteration = chance.randint(1, 3), chance.choice([0, 0, 7])
        others = range(1, self.size)
        self.savers = {0, *chance.choice([others, others, (), self._some(others)])}
        self.owners = set(chance.choice([self.savers, (), self._some(self.savers)]))
        self.fails = chance.choice([0.0, 0.0, 0.1])
        self.ids = range(self.first_id, self.first_id + self.num_steps // self.every)
        self.streams = [self._stream(rank) for rank in range(self.size)]

    def iteration_of(self, id):
        return self.first_iteration + self.every * (id - self.first_id + 1)

    def kill(self):
        """One rank is gone at once, and the others do not get much further."""
        for stream in self.streams:
            del stream[self.chance.randint(0, len(stream)) :]
        self.chance.choice(self.streams).clear()

    def _some(self, ranks):
        return [rank for rank in ranks if self.chance.random() < 0.5]

    def _stream(self, rank):
        stream, being_written = [], []
        ids = iter(self.ids)
        for step in range(1, self.num_steps + 1):
            stream.append(("report", None))
            is_save = step % self.every == 0 and rank in self.savers
            if is_save or self.chance.random() < 0.5:  # a save waits for the one before
                stream += being_written
                being_written = []
            if is_save:
                *now, being_written = self._save(rank, next(ids))
                stream += now
        return [*stream, *being_written, ("end", None)]

    def _save(self, rank, id):
        """What is sent at once, and last a list of what is sent from the background."""
        done = ("part", part(id, rank, self.iteration_of(id), own=rank in self.owners))
        if rank != 0 and rank not in self.owners:
            return done, []
        if self.chance.random() < self.fails:
            done = ("failed", id)
        # now and then, the background is faster
        return (done, ("saving", id), []) if self.chance.random() < 0.3 else (("saving", id), [done])


class Drive:
    """Feeds a ledger as the recorder does, and holds each checkpoint against the world as it is at that moment."""

    def __init__(self, world):
        self.world = world
        self.ledger = Ledger(world.size, world.first_id, world.first_iteration)
        self.counts = [0] * world.size
        self.heard = [set() for _ in range(world.size)]  # the ids that each rank has told of
        self.there, self.failed, self.committed = set(), set(), {}

    def take(self, rank, kind, value):
        if kind == "report":
            self.counts[rank] += 1
        elif kind == "saving":
            self.heard[rank].add(value)
            self.ledger.begin(rank, value)
        elif kind == "failed":
            self.heard[rank].add(value)
            self.failed.add(value)
            self.ledger.fail(rank, value)
        elif kind == "part":
            self.heard[rank].add(value.id)
            self.there.add((rank, value.id))
            self.ledger.add(value)
        else:
            self.ledger.end(rank)
        if kind == "part" or (kind in ("report", "end") and self.ledger.is_waiting):
            self.commit(self.ledger.take_complete(self.counts))
        assert self.ledger.mismatch() is None

    def settle(self):
        self.commit(self.ledger.take_salvage(self.counts))

    def commit(self, cuts):
        for cut in cuts:
            self.check(cut)
            self.committed[cut.id] = {part.rank for part in cut.parts}
        if cuts:
            self.ledger.take_lost()

    def check(self, cut):
        world, ranks = self.world, {part.rank for part in cut.parts}
        assert cut.id > max(self.committed, default=0), "in order, and once"
        assert cut.id not in self.failed
        assert {(part.id, part.iteration) for part in cut.parts} == {(cut.id, world.iteration_of(cut.id))}
        assert 0 in ranks
        assert ranks <= world.savers
        for rank in world.savers:
            assert world.first_iteration + self.counts[rank] >= world.iteration_of(cut.id), "a step would be missing"
        if any(part.has_own for part in cut.parts):
            assert ranks == world.savers
        for rank in world.owners - ranks:
            assert not self.heard[rank], "it had something of its own, and had told so"


def play(seed):
    chance = random.Random(seed)
    world = World(chance)
    drive = Drive(world)
    num_left = chance.choice([None, chance.randint(0, sum(map(len, world.streams)))])
    is_killed = False
    while any(world.streams):
        if num_left == 0:
            world.kill()
            is_killed = True
        num_left = None if num_left is None else num_left - 1
        if alive := [rank for rank in range(world.size) if world.streams[rank]]:
            rank = chance.choice(alive)
            drive.take(rank, *world.streams[rank].pop(0))
    drive.settle()
    return world, drive, is_killed


def test_any_order_of_messages_and_any_kill():
    seen = {"killed": 0, "salvaged": 0, "with own": 0, "failed": 0}
    for seed in range(3000):
        try:
            world, drive, is_killed = play(seed)
            latest = max(drive.committed, default=0)
            if not is_killed:
                assert drive.committed == {id: world.savers for id in world.ids if id not in drive.failed}
            everybody = set(range(world.size))
            whole = [id for id in world.ids if all((rank, id) in drive.there for rank in everybody)]
            assert latest >= max(whole, default=0), "all parts were there"
            have_saved = all(any((rank, id) in drive.there for id in world.ids) for rank in everybody)
            if world.savers == everybody and not world.owners and have_saved:
                fewest = world.first_iteration + min(drive.counts)
                good = [id for id in world.ids if (0, id) in drive.there and world.iteration_of(id) <= fewest]
                assert latest == max(good, default=0), "nothing but the shared state was needed"
        except AssertionError as error:
            error.add_note(f"with seed {seed}")
            raise
        seen["killed"] += is_killed
        seen["salvaged"] += any(ranks != world.savers for ranks in drive.committed.values())
        seen["with own"] += bool(world.owners and drive.committed)
        seen["failed"] += bool(drive.failed)
    assert min(seen.values()) > 15, f"the cases are not worth much: {seen}"


def test_first_reason_why_a_checkpoint_could_not_be_written_is_kept():
    ledger = Ledger(2, 1)
    ledger.fail(1, 1, "no space")
    ledger.fail(0, 1, "rank 1 could not")
    assert ledger.failed == {1: "no space"}


def test_rank_that_ended_with_fewer_reports_than_a_checkpoint_stands_for_is_not_left_out():
    ledger = Ledger(2, 1)
    ledger.add(part(1, 0, iteration=3))
    ledger.end(1)
    assert ledger.take_complete([3, 1]) == [], "step 3 is not one of all ranks"
    assert ranks_of(ledger.take_complete([3, 0])) == {1: [0]}, "who never reports is not waited for"
