"""The phases of an attempt, row by row of the table in `control/attempt.py`, and whose silence means something."""

import math

import pytest

from paceline.control.attempt import (
    AGREE_S,
    SETTLE_S,
    SETTLE_SUSPECT_S,
    Attempt,
    Facts,
    Phase,
    State,
    StopAgreement,
    Wish,
    advance,
)
from paceline.control.notes import Notes
from paceline.recording.gather import Mismatch
from paceline.workers.base import Asked, Died, Raised

ECHO = Raised(0, "RuntimeError", "Connection closed by peer", "…")
OWN = Raised(1, "KeyError", "'lr'", "…")
GRACE_S = 30.0


def move(state=None, wish=None, now=0.0, **facts):
    return advance(
        state or State(), Facts(2, **facts), wish, now, grace_s=GRACE_S, is_suspect=lambda error: error is ECHO
    )


def test_nothing_happens():
    assert move() == State()


def test_every_rank_has_ended():
    assert move(values={0: 1}).phase is Phase.RUNNING
    assert move(values={0: 1, 1: 2}).phase is Phase.OVER
    assert move(values={0: 1}, raised=[OWN]).phase is Phase.OVER


def test_stop_is_wanted_and_has_no_limit():
    state = move(wish=Wish("stop", 1.0), now=5.0)
    assert state == State(Phase.LEAVING)
    assert move(state, wish=Wish("stop", 1.0), now=1e9).phase is Phase.LEAVING


@pytest.mark.parametrize("facts", [{"wish": Wish("terminate", 1.0)}, {"preempted": {0: "x"}, "preempted_at": 1.0}])
def test_notice_has_a_limit(facts):
    state = move(now=2.0, **facts)
    assert (state.phase, state.deadline) == (Phase.LEAVING, 1.0 + GRACE_S)
    assert move(state, now=1.0 + GRACE_S, **facts).phase is Phase.OVER


def test_earlier_of_two_limits_holds():
    state = move(wish=Wish("terminate", 7.0), preempted={0: "x"}, preempted_at=3.0, now=8.0)
    assert state.deadline == 3.0 + GRACE_S


def test_stop_then_a_notice_has_the_limit_of_the_notice():
    state = move(move(wish=Wish("stop", 0.0)), wish=Wish("stop", 0.0), preempted={0: "x"}, preempted_at=9.0, now=9.0)
    assert (state.phase, state.deadline) == (Phase.LEAVING, 9.0 + GRACE_S)


def test_death_explains_itself_at_once():
    assert move(died=[Died(0, "was killed")]).phase is Phase.OVER


@pytest.mark.parametrize(
    ("facts", "patience_s"),
    [
        ({"raised": [OWN]}, SETTLE_S),
        ({"raised": [ECHO]}, SETTLE_SUSPECT_S),
        ({"mismatch": Mismatch((1, 2), (0,))}, SETTLE_SUSPECT_S),
    ],
)
def test_trouble_waits_for_a_better_explanation(facts, patience_s):
    state = move(now=10.0, **facts)
    assert (state.phase, state.trouble_at) == (Phase.TROUBLED, 10.0)
    assert move(state, now=10.0 + 0.9 * patience_s, **facts).phase is Phase.TROUBLED
    assert move(state, now=10.0 + patience_s, **facts).phase is Phase.OVER


def test_trouble_while_leaving_keeps_the_limit():
    state = move(
        move(preempted={0: "x"}, preempted_at=0.0), preempted={0: "x"}, preempted_at=0.0, raised=[ECHO], now=29.0
    )
    assert state.phase is Phase.TROUBLED
    assert move(state, preempted={0: "x"}, preempted_at=0.0, raised=[ECHO], now=30.0).phase is Phase.OVER


def test_growth_ends_a_run_in_which_nobody_has_ended_or_is_leaving():
    assert move(grows=True).phase is Phase.OVER
    assert move(grows=True, values={0: 1}).phase is Phase.RUNNING
    assert move(grows=True, wish=Wish("stop", 0.0)).phase is Phase.LEAVING
    assert move(has_room=True).phase is Phase.RUNNING


def test_an_attempt_without_trouble_has_no_time_of_it():
    assert move(wish=Wish("stop", 0.0), now=5.0).trouble_at == math.inf


class Answers:
    def __init__(self):
        self.given = []

    def answer(self, question, value):
        self.given.append(question.rank)


def test_rank_that_waits_for_an_answer_or_has_returned_is_not_silent():
    attempt = Attempt(Answers(), Facts(4), [1.0, 2.0, 3.0, 4.0])
    assert attempt.silent_rank() == 0
    attempt.turns.append(Asked(0, 1, "turn", 4))
    assert attempt.silent_rank() == 1
    attempt.facts.values[1] = None
    assert attempt.silent_rank() == 2
    attempt.searches.append(Asked(2, 1, "checkpoint", 1))
    assert attempt.silent_rank() == 3
    attempt.facts.values[3] = None
    assert attempt.silent_rank() is None


def test_turn_is_granted_when_the_next_step_is_wanted_and_the_clock_starts_anew():
    group = Answers()
    attempt = Attempt(group, Facts(2), [0.0, 0.0])
    attempt.turns += [Asked(0, 1, "turn", 4), Asked(1, 1, "turn", 5)]
    attempt.wanted = 4
    attempt.grant_turns(now=9.0)
    assert group.given == [0]
    assert attempt.progress == [9.0, 0.0]
    assert [turn.rank for turn in attempt.turns] == [1]


def asked(rank, number):
    return Asked(rank, 1, "stop", number)


def test_all_stop_at_the_furthest_call():
    stops = StopAgreement()
    stops.take(0, asked(0, 12), now=0.0)
    assert stops.settle({0, 1}, now=0.1) == []
    stops.take(1, asked(1, 20), now=0.2)
    assert stops.settle({0, 1}, now=0.2) == [(asked(0, 12), 20), (asked(1, 20), 20)]


def test_rank_that_has_passed_its_call_is_met_at_the_next():
    """It waits for the other in a collective of the next step."""
    stops = StopAgreement()
    stops.take(0, asked(0, 12), now=0.0)
    assert stops.settle({0, 1}, now=AGREE_S) == [(asked(0, 12), None)], "go on"
    stops.take(1, asked(1, 13), now=1.0)
    stops.take(0, asked(0, 13), now=1.1)
    assert [answer for _, answer in stops.settle({0, 1}, now=1.1)] == [13, 13]


def test_rank_that_does_not_look_is_not_waited_for():
    stops = StopAgreement()
    answers = []
    for number in range(1, 4):
        stops.take(0, asked(0, number), now=10.0 * number)
        answers += [answer for _, answer in stops.settle({0, 1}, now=10.0 * number + AGREE_S)]
    assert answers == [None, None, 3]
    stops.take(1, asked(1, 9), now=99.0)
    assert stops.settle({0, 1}, now=99.0) == [(asked(1, 9), 3)], "at once, then"


def test_rank_in_a_long_step_is_waited_for():
    stops = StopAgreement(patience_s=10.0)
    for number in range(1, 9):
        stops.take(0, asked(0, number), now=float(number))
        assert stops.settle({0, 1}, now=number + AGREE_S) == [(asked(0, number), None)]
    stops.take(1, asked(1, 5), now=9.0)
    stops.take(0, asked(0, 9), now=9.0)
    assert [answer for _, answer in stops.settle({0, 1}, now=9.0)] == [9, 9]


def test_rank_that_has_ended_is_not_waited_for():
    attempt = Attempt(None, Facts(3, values={2: "done"}, died=[Died(1, "x")]), [0.0] * 3)
    attempt.stops.take(0, asked(0, 5), now=0.0)
    assert attempt.stops.settle(attempt.running(), now=0.0) == [(asked(0, 5), 5)]


def test_note_reaches_those_who_waited_for_it_and_those_who_come_later():
    notes = Notes()
    early, late = Asked(1, 1, "get", "address"), Asked(2, 1, "get", "address")
    put = Asked(0, 1, "put", ("address", "here"))
    assert notes.take(Asked(1, 2, "get", "another")) == []
    assert notes.take(early) == []
    assert notes.take(put) == [(put, None), (early, "here")]
    assert notes.take(late) == [(late, "here")]
