"""The scripted group of `paceline.testing` beside real ones: what a script can do, all of them answer for alike.

Workers do deeds, which are tuples: a function does them where there are workers, and a script tells them where there
are none. `("wait",)` is for ever, and `("mark", path)` tells the test how far a worker has come without the driver.
"""

import os
import threading
from pathlib import Path

import pytest

from paceline import registry
from paceline.errors import StackDumpError, WorkerStartError
from paceline.testing import ScriptedEngine, asks, dies, raises, reports, returns, unheard
from paceline.workers import resolve_engine
from paceline.workers.base import Asked, Call, Died, Engine, Preload, Raised, Resources, Returned, Sent, Size

KINDS = ["inline", "local", "scripted"]


def do(wire, deeds):
    """The deeds of this rank, for real."""
    for verb, *args in deeds[wire.place.world_rank]:
        match verb:
            case "send":
                wire.send(*args)
            case "ask":
                wire.ask(*args)
            case "raise":
                raise args[0]
            case "return":
                return args[0], True
            case "mark":
                Path(args[0]).touch()
            case "wait":
                threading.Event().wait()
            case "die":
                os._exit(1)
    raise AssertionError("the deeds have no end")


def script_of(deeds):
    """The same, as lines. What is before a mark has been sent when the mark is there, heard or not."""
    lines = []
    for verb, *args in deeds:
        match verb:
            case "send":
                lines.append(lambda rank, kind=args[0], value=args[1]: Sent(rank, kind, value))
            case "ask":
                lines.append(asks(*args))
            case "raise":
                lines.append(raises(*args))
            case "return":
                lines.append(returns(*args))
            case "die":
                lines.append(dies())
            case "mark":
                lines = unheard(*lines)
                Path(args[0]).touch()
    return lines


class Stage:
    """A group on which every attempt does the given deeds, by rank."""

    def __init__(self, kind, *attempts):
        self.kind, self.attempts = kind, list(attempts)
        size = 0 if kind == "inline" else len(attempts[0])
        if kind == "scripted":
            self.engine = ScriptedEngine([[script_of(deeds) for deeds in attempt] for attempt in attempts])
        else:
            self.engine = resolve_engine(kind, max_workers=size)
        self.group = self.engine.group(Size(size, size), Resources(), Preload())
        self.events = []

    def start(self):
        self.group.start()
        self.deeds = self.attempts.pop(0)

    def submit(self, *ranks):
        self.expected = len(self.ends()) + len(ranks or self.group.infos)
        self.group.submit(dict.fromkeys(ranks or range(len(self.group.infos)), Call(do, (self.deeds,))))

    def listen(self, deliver=None):
        """Until every call has been answered."""
        while len(self.ends()) < self.expected:
            self.group.poll(0.1, deliver or self.hear)

    def hear(self, event):
        """Not which files a worker has imported: a script imports none."""
        if not (isinstance(event, Sent) and event.kind == "imported"):
            self.events.append(event)

    def perform(self, *ranks):
        self.submit(*ranks)
        self.listen()
        return self.events

    def ends(self):
        return [event for event in self.events if isinstance(event, Returned | Raised | Died)]

    def heard_of(self, rank):
        return [event for event in self.events if event.rank == rank]


@pytest.fixture(params=KINDS)
def stage(request):
    """Makes stages; one rank where there is only this process."""
    made = []

    def make(*attempts):
        if request.param == "inline":
            attempts = [attempt[:1] for attempt in attempts]
        made.append(Stage(request.param, *attempts))
        made[-1].start()
        return made[-1]

    make.kind = request.param
    yield make
    for one in made:
        one.group.close()


without_this_process = pytest.mark.parametrize("stage", ["local", "scripted"], indirect=True)


def counting(num, *then):
    return [*(("send", "count", number) for number in range(num)), *then]


def two(deeds):
    return [deeds, deeds]


def test_engine_is_one(stage):
    engine = stage(two([("return", 1)])).engine
    assert isinstance(engine, Engine)
    assert engine.name == stage.kind
    assert isinstance(engine.describe(), str)
    assert engine.name in [*registry.names("engine"), "scripted"]


def test_started_group_has_every_rank_and_is_idle(stage):
    group = stage(two([("return", 1)])).group
    size = len(group.infos)
    assert size == (1 if stage.kind == "inline" else 2)
    assert [(info.rank, info.place.world_size) for info in group.infos] == [(rank, size) for rank in range(size)]
    assert group.healthy()
    assert not group.can_grow()


def test_events_keep_their_order_and_the_call_is_answered_once(stage):
    play = stage([counting(5, ("return", "a")), counting(3, ("return", "b"))])
    play.perform()
    play.group.poll(0, play.hear)
    for rank, num, value in [(0, 5, "a"), (1, 3, "b")][: len(play.group.infos)]:
        counted = [Sent(rank, "count", number) for number in range(num)]
        assert play.heard_of(rank) == [*counted, Returned(rank, (value, True))]
    assert play.group.healthy()


def test_group_is_busy_until_every_call_has_been_answered(stage):
    play = stage(two(counting(1, ("return", 1))))
    play.submit()
    assert not play.group.healthy()
    play.listen()
    assert play.group.healthy()


def test_exception_ends_the_call_and_not_the_worker(stage):
    play = stage(two(counting(1, ("raise", KeyError("lr")))))
    play.perform()
    for rank in range(len(play.group.infos)):
        _, raised = play.heard_of(rank)
        assert (raised.rank, raised.type_name, raised.message) == (rank, "KeyError", "'lr'")
        assert raised.exception.args == ("lr",)
        assert "KeyError" in raised.traceback
    assert play.group.healthy()


def test_one_call_after_another(stage):
    play = stage(two(counting(2, ("return", "again"))))
    for _ in range(3):
        play.perform()
    assert len(play.heard_of(0)) == 3 * 3


@without_this_process
def test_only_who_is_called_answers(stage):
    play = stage([counting(1, ("return", "a")), counting(1, ("return", "b"))])
    play.perform(1)
    play.group.poll(0, play.hear)
    assert play.events == [Sent(1, "count", 0), Returned(1, ("b", True))]


def test_worker_that_asked_goes_on_when_it_is_answered(stage):
    play = stage(two([("ask", "double", 21), ("send", "count", 0), ("return", 1)]))

    def deliver(event):
        play.hear(event)
        if isinstance(event, Asked):
            play.group.answer(event, 42)

    play.submit()
    play.listen(deliver)
    kinds = [type(event) for event in play.heard_of(0)]
    assert kinds == [Asked, Sent, Returned]
    assert (play.events[0].topic, play.events[0].value) == ("double", 21)


@without_this_process
def test_worker_that_is_not_answered_waits(stage):
    play = stage([[("ask", "double", 1), ("return", "a")], counting(1, ("return", "b"))])
    play.submit()
    while len(play.events) < 3:
        play.group.poll(0.1, play.hear)
    for _ in range(3):
        play.group.poll(0, play.hear)
    [question] = play.heard_of(0)
    play.group.answer(question, 2)
    play.listen()
    assert play.heard_of(0) == [question, Returned(0, ("a", True))]


@without_this_process
def test_answer_for_one_who_is_gone_does_nothing(stage):
    play = stage([[("ask", "double", 1), ("return", "a")], [("die",)]], two([("return", 1)]))
    play.submit()
    while len(play.events) < 2:
        play.group.poll(0.1, play.hear)
    [question] = play.heard_of(0)
    play.group.answer(Asked(1, 1, "double", 1), 2)
    play.group.abort(lambda event: None)
    play.group.answer(question, 2)
    play.group.close()
    play.group.answer(question, 2)
    play.start()
    assert play.group.healthy()


@without_this_process
def test_death_comes_last_and_the_group_is_not_healthy(stage):
    play = stage([counting(4, ("die",)), [("return", "alive")]])
    play.perform()
    play.group.poll(0, play.hear)
    *counted, died = play.heard_of(0)
    assert counted == [Sent(0, "count", number) for number in range(4)]
    assert isinstance(died, Died)
    assert died.reason
    assert play.heard_of(1) == [Returned(1, ("alive", True))]
    assert not play.group.healthy()


def test_stacks_are_of_every_rank_and_nobody_has_one_afterwards(stage):
    play = stage(two([("return", 1)]))
    play.perform()  # who is just starting has no stack yet
    group = play.group
    stacks = group.stacks()
    assert sorted(stacks) == list(range(len(group.infos)))
    assert all(isinstance(text, str) and text for text in stacks.values())
    group.close()
    with pytest.raises(StackDumpError, match="no workers"):
        group.stacks()


@without_this_process
def test_abort_hands_over_what_was_sent_and_start_makes_the_group_whole(stage, tmp_path):
    marks = [tmp_path / "0", tmp_path / "1"]
    first = [counting(num, ("mark", str(marks[rank])), ("wait",)) for rank, num in ((0, 7), (1, 3))]
    play = stage(first, two(counting(1, ("return", "whole"))))
    play.submit()
    while not all(mark.exists() for mark in marks):
        threading.Event().wait(0.01)
    play.group.abort(play.hear)
    for rank, num in ((0, 7), (1, 3)):
        sent = [event for event in play.heard_of(rank) if not isinstance(event, Died)]
        assert sent == [Sent(rank, "count", number) for number in range(num)]
    assert not play.group.healthy()
    play.events.clear()
    play.start()
    assert play.group.healthy()
    assert {event.value for event in play.perform() if isinstance(event, Returned)} == {("whole", True)}
    assert len(play.events) == 4, "nothing of the aborted calls"


def test_call_that_was_aborted_before_it_was_heard_says_nothing_more(stage):
    play = stage(two([("return", "early")]), two([("return", "late")]))
    play.submit()
    play.group.abort(lambda event: None)
    play.start()
    play.group.poll(0, play.hear)
    assert play.events == []
    assert {event.value for event in play.perform()} == {("late", True)}


def test_idle_group_may_be_aborted(stage):
    play = stage(two([("return", 1)]), two([("return", 2)]))
    play.group.abort(play.hear)
    play.start()
    assert play.group.healthy()
    assert all(isinstance(event, Died) for event in play.events)


@pytest.mark.parametrize("is_running", [False, True])
def test_close_ends_everything_and_is_idempotent(stage, is_running):
    play = stage(two(counting(1, ("return", 1))))
    if is_running:
        play.submit()
    play.group.close()
    play.group.close(grace_s=1.0)
    assert list(play.group.infos) == []
    assert not play.group.healthy()
    assert not play.group.can_grow()
    play.group.request_stop()


@pytest.mark.parametrize("stage", ["inline", "scripted"], indirect=True)
def test_nothing_is_heard_after_close(stage):
    play = stage(two(counting(3, ("return", 1))))
    play.submit()
    play.group.close()
    play.group.poll(0.1, play.hear)
    assert play.events == []


# --- what only a script does ----------------------------------------------------------------------------------------


def scripted(*attempts):
    group = ScriptedEngine(attempts).group(Size(1, 1), Resources(), Preload())
    group.start()
    return group


def test_what_is_unheard_is_polled_one_by_one():
    group = scripted([[*reports(1), *unheard(*reports(2, start=2)), returns()]])
    group.submit({0: Call(do)})
    for num_heard in range(1, 5):
        events = []
        group.poll(0, events.append)
        assert len(events) == 1, num_heard
    assert group.healthy()


def test_abort_finds_no_more_than_what_is_unheard():
    group = scripted([[*unheard(*reports(2)), *reports(1, start=3), *unheard(*reports(1, start=4))]])
    group.submit({0: Call(do)})
    events = []
    group.abort(events.append)
    assert [event.value["_training_iteration"] for event in events] == [1, 2]


def test_group_has_room_and_is_asked_to_stop_when_the_test_says_so():
    group = scripted([[returns()]])
    group.has_room = True
    assert group.can_grow()
    assert not group.stop_requested
    group.request_stop()
    assert group.stop_requested


def test_script_has_no_further_attempt():
    group = scripted([[returns()]])
    with pytest.raises(WorkerStartError, match="no attempt after 1"):
        group.start()
    assert list(group.infos) == []
    assert not group.healthy()


@pytest.mark.parametrize(
    ("script", "message"),
    [([dies(), *reports(1)], "goes on after its death"), ([returns(1), returns(2)], "answers one call twice")],
)
def test_script_that_no_worker_could_play(script, message):
    group = scripted([script])
    group.submit({0: Call(do)})
    polls = (group.poll(0, lambda event: None) for _ in script)
    with pytest.raises(AssertionError, match=message):
        list(polls)
