"""The worker's end of the connection on Ray, without Ray: a queue that polls empty."""

import threading
from types import SimpleNamespace

import pytest

from paceline.workers import parcel, ray_worker
from paceline.workers.ray_worker import RayWire, RayWorker, Unwind


@pytest.mark.timeout(30)
def test_flush_waits_until_what_was_said_has_arrived_and_for_nothing_else(monkeypatch):
    monkeypatch.setattr(ray_worker, "FLUSH_S", None)
    wire = RayWire("here")
    wire.flush()
    wire.send("note", 1)
    flushing = threading.Thread(target=wire.flush)
    flushing.start()
    assert wire.take(0, 0) == [("note", 1)]
    assert flushing.is_alive(), "the answer may still be lost"
    assert wire.take(0, 0) == []
    flushing.join()
    wire.flush()


@pytest.mark.timeout(30)
def test_nobody_waits_for_an_answer_in_a_call_that_is_unwinding():
    wire = RayWire("here")
    wire.is_unwinding = True
    with pytest.raises(Unwind):
        wire.ask("storage", None)  # this is not the thread of the call: such a one may still be writing a checkpoint


def test_line_is_given_back_before_the_end_of_the_call_is_known(monkeypatch):
    """The next call may come at once, and is not to find the line of this one, which is then closed under it."""
    worker, did = RayWorker.__new__(RayWorker), []
    worker._wire, worker._garbage = RayWire("here"), SimpleNamespace(collect=lambda: did.append("collect"))
    monkeypatch.setattr(worker._wire, "hang_up", lambda: did.append("hang_up"))
    monkeypatch.setattr(worker._wire, "send", lambda kind, value: did.append(kind))
    for call in (lambda wire: None, lambda wire: 1 / 0):
        worker._answer(parcel.dumps((call, ())))
    assert did == ["hang_up", "returned", "collect", "hang_up", "raised", "collect"]


def test_line_does_not_go_while_somebody_wakes_it():
    wire = RayWire("here")
    wire._line = line = SimpleNamespace(close=lambda: None)
    with wire._changed:  # as `begin_unwinding` has it
        thread = threading.Thread(target=wire.hang_up)
        thread.start()
        thread.join(0.1)
        assert wire._line is line
    thread.join()
    assert wire._line is None


@pytest.mark.parametrize("is_spent", [False, True])
def test_process_that_is_replaced_anyway_is_not_waited_for(is_spent):
    """A survivor of TensorFlow's sits in a collective in which a rank is missing, and its process is for one group."""
    worker, waits = RayWorker.__new__(RayWorker), []
    worker._wire = RayWire("here")
    worker._wire.is_spent = is_spent
    worker._thread = SimpleNamespace(join=waits.append, is_alive=lambda: True)
    worker._wire.send("note", 1)
    assert worker.unwind(5.0) == (False, [("note", 1)])
    assert waits == [ray_worker._SPENT_S if is_spent else 5.0]


def test_reports_of_several_threads_all_arrive_in_their_order():
    wire = RayWire("here")
    threads = [threading.Thread(target=lambda n=n: [wire.report((n, i)) for i in range(2000)]) for n in range(4)]
    for thread in threads:
        thread.start()
    taken = []
    while len(taken) < 8000:
        taken += [value for _, value in wire.take(0, 10.0)]
    for thread in threads:
        thread.join()
    for n in range(4):
        assert [i for which, i in taken if which == n] == list(range(2000))


def test_a_full_queue_makes_the_loop_wait(monkeypatch):
    monkeypatch.setattr(ray_worker, "QUEUE_LIMIT", 3)
    wire = RayWire("here")
    loop = threading.Thread(target=lambda: [wire.report(number) for number in range(10)])
    loop.start()
    taken = []
    while len(taken) < 10:
        batch = [value for _, value in wire.take(0, 10.0)]
        assert len(batch) <= 3
        taken += batch
    loop.join()
    assert taken == list(range(10))
