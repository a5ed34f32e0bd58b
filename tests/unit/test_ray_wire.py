"""The worker's end of the connection on Ray, without Ray: a queue that polls empty."""

import threading

import pytest

from paceline.workers import ray_worker
from paceline.workers.ray_worker import RayWire, Unwind


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
