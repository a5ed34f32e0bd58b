"""What the session functions do outside a run, and what they add by themselves."""

import io
import os
import socket
import sys
import threading

import pytest

from paceline import rank_session, session
from paceline.errors import TrainerStateError
from paceline.testing.worker import RecordingWire, as_worker, make_session
from paceline.workers.base import Place


def test_host_is_looked_up_once(monkeypatch):
    """A name server that does not answer takes seconds."""
    asked = []
    monkeypatch.setattr(socket, "gethostname", lambda: "a-host-of-this-test")
    monkeypatch.setattr(socket, "gethostbyname", lambda name: asked.append(name) or "192.0.2.7")
    metrics = [rank_session._detailed(total_s) for total_s in (1.0, 2.0)]
    assert [(one["_hostname"], one["_node_ip"]) for one in metrics] == [("a-host-of-this-test", "192.0.2.7")] * 2
    assert asked == ["a-host-of-this-test"]


def numbers(wire):
    return [report["_training_iteration"] for report in wire.reports]


def test_threads_report_in_the_order_of_the_numbers():
    """The first report is held up on its way, as by a full pipe: the second must not overtake it."""
    with as_worker() as wire:
        keep, second = wire.report, threading.Thread(target=session.report)

        def hold_up(packed):
            wire.report = keep
            second.start()
            second.join(0.3)
            keep(packed)

        wire.report = hold_up
        session.report()
        second.join(60)
        assert numbers(wire) == [1, 2]


def test_signal_handler_that_reports_in_the_middle_of_a_report_takes_a_number_of_its_own():
    class Interrupted:
        """Is packed while a signal comes."""

        def __reduce__(self):
            session.report()
            return int, ()

    with as_worker() as wire:
        session.report(x=Interrupted())
        session.report()
        assert sorted(numbers(wire)) == [1, 2, 3]


def test_sessions_of_threads_overlap_and_none_stays():
    first, second = as_worker(), as_worker()
    first.__enter__()
    wire = second.__enter__()
    first.__exit__(None, None, None)
    session.report()
    assert numbers(wire) == [1]
    second.__exit__(None, None, None)
    assert session.current() is None


def test_rank_without_a_driver_stops_at_once():
    with as_worker(Place(world_rank=1, world_size=2)) as wire:
        assert not session.should_stop()
        wire.stopping = True
        assert session.should_stop()
        assert session.should_stop()


def test_stop_that_is_wanted_in_the_middle_of_a_look_waits_for_the_next_call():
    """Else this rank would leave at a call on which nobody has agreed, while the others go on."""

    class JustNow(RecordingWire):
        looks = iter([False, True])
        stopping = property(lambda self: next(self.looks), lambda self, value: None)

    place = Place(world_rank=1, world_size=2)
    assert not make_session(place, JustNow(place)).should_stop()


def test_data_shard_outside_a_run_says_how_to_have_one():
    with pytest.raises(TrainerStateError, match=r"Trainer\(num_workers=0\)\.run\(train_func, dataset="):
        session.get_data_shard()


@pytest.mark.parametrize("raised", [None, KeyError("mine"), SystemExit(3)])
def test_fork_ends_whatever_it_has_done_to_its_streams(monkeypatch, raised):
    class Ended(BaseException):
        pass

    def leave(code):
        raise Ended(code)

    class Closed(io.StringIO):
        def flush(self):
            raise ValueError("I/O operation on closed file")

    closed = Closed()
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(sys, "stdout", closed)
    monkeypatch.setattr(sys, "stderr", closed)
    with pytest.raises(Ended):
        session.end_fork(raised)
