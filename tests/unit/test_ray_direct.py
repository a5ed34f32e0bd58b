"""The short way past Ray, with both of its ends in one process."""

import gc
import locale
import math
import os
import select
import threading
from collections import deque
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from paceline.workers import ray, ray_direct
from paceline.workers.base import DIRECT, Asked, Died
from paceline.workers.framing import UnreadError
from paceline.workers.ray import RayGroup
from paceline.workers.ray_direct import LineEnd, Lines


@pytest.fixture
def lines():
    lines = Lines()
    yield lines
    lines.clear()


def open_files():
    gc.collect()  # what other tests have dropped
    return len(os.listdir("/proc/self/fd"))


def asking(end, value):
    """The thread of a call that asks; it has what came of it."""
    found = []

    def ask():
        try:
            found.append(end.ask("topic", value))
        except EOFError:
            found.append("no answer any more")

    thread = threading.Thread(target=ask, daemon=True)
    thread.found = found
    thread.start()
    return thread


def questions(lines):
    """As soon as there are any."""
    while not (found := lines.questions(1.0)):
        pass
    return found


def joined(thread):
    thread.join(10)
    return thread.found


@pytest.mark.parametrize("size", [1, 5_000_000])
def test_questions_and_their_answers(lines, size):
    ends = [LineEnd(lines.make(rank)) for rank in range(2)]
    for rank in range(2):
        lines.settle(rank, is_open=True)
    for _ in range(3):
        asked = [asking(end, bytes(size)) for end in ends]
        found = {}
        while len(found) < 2:
            found |= {one.rank: (one.topic, one.value) for one in questions(lines)}
        assert found == dict.fromkeys(range(2), ("topic", bytes(size)))
        for rank in range(2):
            lines.answer(rank, bytes(size) + str(rank).encode())
        assert [joined(one) for one in asked] == [[bytes(size) + b"0"], [bytes(size) + b"1"]]


def test_line_is_in_use_when_the_worker_has_it_and_gone_when_it_hangs_up(lines):
    end = LineEnd(lines.make(3))
    assert lines.num_settled == 0
    lines.settle(3, is_open=True)
    assert lines.num_settled == 1
    end.close()
    assert lines.questions(10.0) == []
    assert lines.num_settled == 0
    lines.answer(3, "to nobody")


def test_worker_that_could_not_open_its_line_has_none(lines):
    (path, name), *others = lines.make(0)
    with pytest.raises(OSError, match="is not"):  # on another machine, another file may be there
        LineEnd(((path, name + "x"), *others))
    lines.settle(0, is_open=False)
    assert lines.num_settled == 0
    lines.answer(0, "to nobody")


@pytest.mark.parametrize("end_it", [lambda end, lines: end.wake(), lambda end, lines: lines.clear()])
def test_who_waits_is_woken_or_learns_that_the_driver_is_gone(lines, end_it):
    end = LineEnd(lines.make(0))
    lines.settle(0, is_open=True)
    thread = asking(end, 1)
    questions(lines)
    end_it(end, lines)
    assert joined(thread) == ["no answer any more"]


def test_what_pickle_does_not_know_travels_all_the_same(lines):
    def local():
        return "from a function within a function"

    end = LineEnd(lines.make(0))
    lines.settle(0, is_open=True)
    thread = asking(end, local)
    [asked] = questions(lines)
    lines.answer(0, local)
    assert asked.value() == joined(thread)[0]() == local()


class Unwelcome:
    """Travels, and cannot be had where it arrives."""

    def __init__(self, error):
        self.error = error

    def __reduce__(self):
        return _raise, (self.error,)


def _raise(error):
    raise error


@pytest.mark.parametrize("error", [ZeroDivisionError("of the user's"), SystemExit(3)])
def test_what_cannot_be_unpickled_is_the_error_of_its_rank_alone(lines, error):
    ends = [LineEnd(lines.make(rank)) for rank in range(2)]
    for rank, value in enumerate((1, Unwelcome(error))):
        lines.settle(rank, is_open=True)
        asking(ends[rank], value)
    found = []
    while len(found) < 2:
        found += questions(lines)
    asked, raised = sorted(found, key=lambda event: event.rank)
    assert (asked.rank, asked.value) == (0, 1)
    assert (raised.rank, raised.type_name) == (1, type(error).__name__)
    lines.clear()


def test_worker_that_does_not_read_has_no_line_any_more(lines, monkeypatch):
    """There is half of an answer in it: whatever came next would be taken for the rest."""
    monkeypatch.setattr(ray_direct, "TELL_S", 0.1)
    end = LineEnd(lines.make(0))
    lines.settle(0, is_open=True)
    with pytest.raises(UnreadError):
        lines.answer(0, bytes(5_000_000))
    assert lines.num_settled == 0
    with pytest.raises(BrokenPipeError):
        end.ask("topic", 1)


def test_such_a_worker_counts_as_dead(monkeypatch):
    """It is stopped, say. When it goes on it would wait for ever, and the driver for it."""
    monkeypatch.setattr(ray_direct, "TELL_S", 0.1)
    group, dismissed, events = RayGroup.__new__(RayGroup), [], []
    actor = SimpleNamespace(rank=0, dismiss=lambda: dismissed.append(0))
    group._roster, group._lines = SimpleNamespace(seated=lambda: [actor]), Lines()
    group._waiting, group._next_look = deque(), math.inf
    group._lines.make(0)
    group.answer(Asked(0, DIRECT, "topic", None), bytes(5_000_000))
    group.poll(0.0, events.append)
    assert (dismissed, [type(event) for event in events]) == ([0], [Died])


def test_worker_that_ends_unknown_to_ray_is_dead_and_what_it_asked_comes_first(monkeypatch):
    """A process that it has forked holds its sockets, say. A question that comes after its end would be answered, and
    what it says to that waited for."""
    monkeypatch.setattr(ray, "draining_nodes", set)
    group, dismissed, events = RayGroup.__new__(RayGroup), [], []
    watch = SimpleNamespace(look=lambda: True)
    actor = SimpleNamespace(rank=0, is_alive=True, process=watch, dismiss=lambda: dismissed.append(0))
    group._roster, group._lines = SimpleNamespace(seated=lambda: [actor]), Lines()
    group._waiting, group._next_look = deque(), 0.0
    end = LineEnd(group._lines.make(0))
    group._lines.settle(0, is_open=True)
    thread = asking(end, "done")
    while not select.select([group._lines._lines[0].inbox], [], [], 1.0)[0]:
        pass
    group.poll(0.0, events.append)
    assert dismissed == [0]
    assert events == [Asked(0, DIRECT, "topic", "done"), Died(0, "was lost (its process has ended)")]
    assert joined(thread) == ["no answer any more"]


@pytest.mark.parametrize("now", [None, ("02", "here"), ("01", "elsewhere")], ids=["none", "again", "another"])
def test_who_has_left_ray_has_lost_its_workers_and_starts_no_other_cluster(monkeypatch, now):
    """Nor does it ask the next one, which knows nothing of them."""
    monkeypatch.setattr(ray, "connection", lambda: now)
    group, events = RayGroup.__new__(RayGroup), []
    group._connection = ("01", "here")
    actors = [SimpleNamespace(rank=rank, is_alive=True) for rank in range(2)]
    for actor in actors:
        actor.dismiss = lambda actor=actor: setattr(actor, "is_alive", False)
    group._roster, group._lines = SimpleNamespace(seated=lambda: actors), Lines()
    group._waiting, group._next_look = deque(), math.inf
    group.answer(Asked(0, 1, "topic", None), "through Ray")
    group._roster.infos = [None, None]
    group.request_stop()
    assert group.stacks() == dict.fromkeys(range(2), "(no answer: this process has left the cluster of the worker)\n")
    group.poll(0.0, events.append)
    assert [(type(event), event.rank) for event in events] == [(Died, 0), (Died, 1)]
    group.poll(0.0, events.append)
    group.abort(events.append)
    assert len(events) == 2


def test_nothing_is_left_open():
    former = open_files()
    lines = Lines()
    for _ in range(3):
        ends = [LineEnd(lines.make(rank)) for rank in range(2)]
        lines.settle(0, is_open=True)
        ends[0].close()
        ends[1].close()
        lines.clear()
    assert open_files() == former


def test_too_many_open_files_leave_nothing_open(monkeypatch, lines):
    lines.make(0)  # has what it needs for all of them
    former = open_files()
    for calls in range(3):
        with monkeypatch.context() as context:
            context.setattr(os, "pipe2", refusing(os.pipe2, after=calls))
            with pytest.raises(OSError, match="too many") if calls < 2 else nullcontext():
                lines.make(1)
    assert open_files() == former + 5
    assert lines.num_settled == 0


def refusing(act, after):
    calls = iter(range(100))

    def limited(*args):
        if next(calls) >= after:
            raise OSError("too many open files")
        return act(*args)

    return limited


def test_log_of_a_rank_whatever_the_driver_s_locale_is(tmp_path):
    """A progress bar is enough, or what is no text at all."""
    group, text = RayGroup.__new__(RayGroup), "100%|██████| \ufffd\n"
    group._logs = {0: tmp_path / "rank_0.log"}
    before = locale.setlocale(locale.LC_CTYPE)
    locale.setlocale(locale.LC_CTYPE, "C")
    try:
        group._log(0, text)
    finally:
        locale.setlocale(locale.LC_CTYPE, before)
    assert group._logs[0].read_text("utf-8") == text
