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
