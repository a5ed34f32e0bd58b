"""A worker's messages to the driver, whoever sends them in the midst of another."""

import os
import pickle
import signal

import pytest

from paceline.errors import TrainerStateError
from paceline.workers import worker_process
from paceline.workers.base import Place
from paceline.workers.framing import FrameReader, write_frame


def ask(wire):
    with pytest.raises(TrainerStateError, match="Let it set a flag, and ask in the loop"):
        wire.ask("topic", None)


@pytest.mark.parametrize(
    ("act", "expected"), [(lambda wire: wire.send("inner", 2), [("outer", 1), ("inner", 2)]), (ask, [("outer", 1)])]
)
def test_signal_handler_in_the_midst_of_a_message(monkeypatch, act, expected):
    """As one that saves a checkpoint when the machine is about to be taken away. It must not wait for the message that
    it has interrupted, and what is sent arrives whole."""
    reads, writes = os.pipe()
    os.set_blocking(reads, False)
    wire = worker_process.ProcessWire(reads, writes, writes, Place())

    def interrupted(fd, body):
        if b"outer" in body:
            os.kill(os.getpid(), signal.SIGUSR1)
        write_frame(fd, body)

    def give_up(*_):
        raise TimeoutError("the handler waits for what it has interrupted")

    monkeypatch.setattr(worker_process, "write_frame", interrupted)
    before = {
        number: signal.signal(number, handler)
        for number, handler in {signal.SIGUSR1: lambda *_: act(wire), signal.SIGALRM: give_up}.items()
    }
    signal.setitimer(signal.ITIMER_REAL, 10)
    try:
        wire.send("outer", 1)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
    sent = [pickle.loads(body)[:2] for body in FrameReader(reads).bodies()]
    os.close(reads)
    os.close(writes)
    assert sent == expected
