"""Both ends of the workers' call, each without the other: what the driver waits for when one of them is lost, and how
long; and what a worker keeps whose call is ended."""

import math
import os
import signal
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from paceline.backends.base import BackendConfig
from paceline.errors import WorkersLostError, WorkerStartError
from paceline.sgd.link import BUSY_S, Link, LostError
from paceline.sgd.models import NumpyModel
from paceline.sgd.serving import DONE, FAILED, SIDE, TOPIC, serve
from paceline.sgd.side import Spec
from paceline.testing import RecordingWire
from paceline.workers.base import Asked, Died, Place, Printed

SPEC = Spec(lambda: None, 1, "simple", 2.0, 1000)


class Workers:
    """Answer what they are asked after `busy_s`, by a clock that goes on while the driver polls. Rank 1 dies instead
    once `is_dying` is set; `late` has, by rank, after how long another answers the next time, and what."""

    def __init__(self, busy_s=1.0, num_workers=2):
        self.busy_s, self.is_dying, self.now = busy_s, False, 0.0
        self.infos = [None] * num_workers
        self.late = {}
        self._due = []

    def submit(self, calls, logs):
        for rank in calls:
            self._ask(rank)

    def answer(self, question, command):
        if self.is_dying and question.rank == 1:
            self._due.append((self.now, Died(1, "was killed")))
        else:
            self._ask(question.rank)

    def _ask(self, rank):
        busy_s, reply = self.late.pop(rank, (self.busy_s, (DONE, rank)))
        self._due.append((self.now + busy_s, Asked(rank, 1, TOPIC, reply)))

    def poll(self, timeout_s, deliver):
        self.now += timeout_s
        happened = [one for one in self._due if one[0] <= self.now]
        self._due = [one for one in self._due if one not in happened]
        for _, event in happened:
            deliver(event)


def linked(workers, **more):
    size = len(workers.infos)
    crew = SimpleNamespace(group=workers, world_size=size, get_ready=lambda join_s: workers)
    link = Link(lambda: crew, BackendConfig(), clock=lambda: workers.now, **more)
    assert link.open(lambda infos: (None, {}), SPEC) == list(range(size))
    return link


def lost(workers, link, busy_s):
    workers.is_dying, workers.busy_s = True, busy_s
    with pytest.raises(LostError) as caught:
        link.ask("compute")
    return caught.value


@pytest.mark.parametrize(
    ("usual_s", "busy_s", "more"),
    [(0.1, 0.9 * BUSY_S, {}), (100.0, 200.0, {}), (0.1, 2 * BUSY_S, {"hang_timeout_s": 3 * BUSY_S})],
    ids=["the first step may take longer", "as the steps before", "as hang_timeout_s allows"],
)
def test_who_is_in_the_middle_of_a_step_when_another_dies_comes_to_its_end(usual_s, busy_s, more):
    workers = Workers(usual_s)
    link = linked(workers, **more)
    link.ask("compute")
    found = lost(workers, link, busy_s)
    assert (found.idle, found.values, found.reason) == ((0,), [0], "rank 1 was killed")


def test_what_a_command_has_carried_is_not_kept():
    link, state = linked(Workers()), np.zeros(3)
    kept = weakref.ref(state)
    link.ask("load", state)
    del state
    assert kept() is None, "it may be as large as the model"


def test_those_that_are_left_are_told_before_they_are_waited_for():
    """They may wait for data that the lost one was to take first."""
    workers = Workers()
    link, told = linked(workers), []
    link.on_lost = lambda: told.append(workers.now)
    workers.busy_s = 5.0
    begin = workers.now
    lost(workers, link, 5.0)
    assert [now < begin + 1 for now in told] == [True]


class CrewInName:
    """Of which one is the first, and whose others can be had if they `may_start`."""

    def __init__(self, workers, may_start=True):
        self.group, self.world_size, self._may_start, self.did = workers, 2, may_start, []
        self.shown = []
        self.output = SimpleNamespace(flush=lambda: None, take=lambda rank, text: self.shown.append((rank, text)))

    def get_ready(self, join_s):
        self.limits = [join_s]
        return self.group

    def ensure(self, join_s):
        self.limits = [join_s]
        self.did.append("ensure")
        if not self._may_start:
            raise WorkerStartError("there is no memory")

    def release(self, deliver):
        self.did.append("release")
        for event in (Died(0, "was killed"), Printed(1, "no room left\n")):
            deliver(event)

    def break_up(self, grace_s=0.0):
        self.did.append("break_up")


@pytest.mark.parametrize("may_start", [True, False])
def test_next_workers_are_had_while_the_others_come_to_rest(may_start):
    """Or when these have ended: what kept them from starting may be the room that those took."""
    workers = Workers()
    first, second, third = (CrewInName(workers, is_fine) for is_fine in (True, may_start, True))
    crews = iter((first, second, third))
    link = Link(lambda: next(crews), BackendConfig(), clock=lambda: workers.now)
    link.open(lambda infos: (None, {}), SPEC)
    link.on_lost = link.prepare
    lost(workers, link, 1.0)
    assert (first.did, second.did) == ([], ["ensure"] if may_start else ["ensure", "break_up"])
    link.prepare()
    assert third.did == ([] if may_start else ["ensure"]), "one at a time"
    link.give_up()
    assert first.did == ["release", "break_up"]
    assert first.shown == [(1, "no room left\n")], "the last that they have printed may tell why"
    assert link.crew is (second if may_start else third)


def test_joining_has_the_bound_of_what_it_is_done_for():
    workers, crews = Workers(), []

    def new_crew():
        crews.append(CrewInName(workers))
        return crews[-1]

    link = Link(new_crew, BackendConfig(), clock=lambda: workers.now)
    with link.within(70.0):
        link.open(lambda infos: (None, {}), SPEC)
    link.prepare()
    assert [crew.limits for crew in crews] == [[70.0], [BUSY_S]], "who replaces a lost one never waits without one"


@pytest.mark.parametrize(("first_s", "is_busy"), [(5.0, True), (0.1, False)])
def test_state_of_who_is_at_rest_is_taken_before_others_are_started(first_s, is_busy):
    workers = Workers()
    link, told = linked(workers), []
    link.on_lost = lambda: told.append(link.all_busy)
    lost(workers, link, first_s)
    assert told == [is_busy]


def test_handler_raises_while_the_next_workers_are_started():
    workers = Workers()
    link = linked(workers)
    crew = CrewInName(workers)
    crew.ensure = lambda join_s: os.kill(os.getpid(), signal.SIGALRM)
    link._new_crew = lambda: crew

    def give_up(*_):
        raise TimeoutError("of the user's")

    before = signal.signal(signal.SIGALRM, give_up)
    try:
        with pytest.raises(TimeoutError, match="of the user's"):
            link.prepare()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert crew.did == ["break_up"]


def test_next_workers_end_with_a_program_that_ends_well_in_a_recovery():
    """As by sys.exit(0) in the handler of a signal."""
    workers = Workers()
    first, second = CrewInName(workers), CrewInName(workers)
    crews = iter((first, second))
    link = Link(lambda: next(crews), BackendConfig(), clock=lambda: workers.now)
    link.open(lambda infos: (None, {}), SPEC)
    link.on_lost = link.prepare
    lost(workers, link, 1.0)
    link.close()
    assert (first.did, second.did) == (["break_up"], ["ensure", "break_up"])


def test_handler_raises_while_a_command_is_written(monkeypatch):
    """Half of it may be on its way: there is no next one."""
    workers = Workers()
    link = linked(workers)

    def interrupted(question, command):
        raise TimeoutError("of the user's")

    monkeypatch.setattr(workers, "answer", interrupted)
    with pytest.raises(TimeoutError, match="of the user's"):
        link.ask("compute")
    assert link.is_torn


def test_who_never_comes_to_rest_is_not_waited_for_for_ever():
    workers = Workers()
    found = lost(workers, linked(workers), math.inf)
    assert found.idle == ()
    assert found.reason == "rank 1 was killed; rank 0 did not come to the end of its step"
    assert workers.now < BUSY_S + 10


def test_worker_whose_call_is_ended_keeps_nothing_of_it():
    """On Ray it may be in the next group: with what its side has begun, others would wait for it in the former one."""

    class Ended(BaseException):
        pass

    class Weights(NumpyModel):
        weights = {"a": np.ones(2)}  # noqa: RUF012

    class Wire(RecordingWire):
        def ask_directly(self, topic, value):
            assert SIDE in self.shared
            raise Ended

    wire = Wire(Place())
    with pytest.raises(Ended):
        serve(wire, wire.task(), Spec(lambda: Weights(), 1, "simple", 1.0, 1000))
    assert SIDE not in wire.shared


def test_who_is_left_and_does_not_answer_is_not_waited_for_for_ever():
    """Asked for the state, or to make its model anew."""
    workers = Workers()
    link = linked(workers)
    left = lost(workers, link, 1.0).idle
    workers.busy_s = math.inf
    with pytest.raises(WorkersLostError, match="Rank 0 did not answer within 60 s"), link.within(link.renewing_s):
        link.ask_each(dict.fromkeys(left, ("made", ())))
    assert workers.now < 2 * BUSY_S


@pytest.mark.parametrize("late", [(DONE, 2), (FAILED, ("RuntimeError", "Connection closed by peer", "", None))])
def test_answer_of_one_who_comes_to_rest_late_is_not_taken_for_that_of_another(late):
    """Rank 2 is in the middle of its step, and rank 0 is asked for its state meanwhile."""
    workers = Workers(num_workers=3)
    link = linked(workers)
    workers.late = {2: (2.0, late)}
    left = lost(workers, link, 0.1).idle
    assert left == (0,)
    workers.busy_s = 5.0
    assert link.ask_each(dict.fromkeys(left, ("made", ()))) == [0]
    assert link.ask_each(dict.fromkeys((0, 2), ("made", ()))) == [0, 2], "it can be asked from now on"


def test_state_that_took_long_at_first_may_take_long_again():
    """It may be many times as large as what a step sends."""
    workers = Workers()
    link = linked(workers, hang_timeout_s=2.0)
    assert link.answering_s == BUSY_S, "models have at least that to be made, or to go on in their data"
    workers.busy_s = BUSY_S
    link.ask("load", b"", 0, ())
    assert link.answering_s > 2 * BUSY_S
    workers.busy_s = 2 * BUSY_S
    with link.within(link.answering_s):
        link.call(print)
    workers.busy_s = math.inf
    with pytest.raises(WorkersLostError, match="Rank 0, 1 did not answer"), link.within(link.answering_s):
        link.call(print)


def test_nobody_is_hurried_without_a_hang_timeout():
    assert linked(Workers()).answering_s is None


def test_what_a_function_of_the_users_takes_is_no_measure_of_a_step():
    workers = Workers()
    link = linked(workers)
    workers.busy_s = 1000.0
    link.call(print)
    found = lost(workers, link, math.inf)
    assert found.idle == ()
    assert workers.now < 1000.0 + 2 * BUSY_S
