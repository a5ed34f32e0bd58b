"""Who waits at a pipe stays awake for a moment, and no longer."""

import os
import select
import time

from paceline.workers import pipes
from paceline.workers.pipes import stay_awake


class Poller:
    """Of which something can be read when it was asked so often."""

    def __init__(self, num_in_vain):
        self.num_asked, self._num_in_vain = 0, num_in_vain

    def poll(self, timeout):
        assert timeout == 0, "it would sleep"
        self.num_asked += 1
        return [(0, select.POLLIN)] if self.num_asked > self._num_in_vain else []


def test_until_something_comes(monkeypatch):
    monkeypatch.setattr(pipes, "AWAKE_S", 60.0)
    poller = Poller(num_in_vain=5)
    stay_awake(poller, since=time.perf_counter())
    assert poller.num_asked == 6


def test_nobody_is_asked_when_the_moment_is_over():
    poller = Poller(num_in_vain=0)
    stay_awake(poller, since=time.perf_counter() - pipes.AWAKE_S)
    assert poller.num_asked == 0


def test_no_longer_than_a_moment_if_nothing_comes():
    reads, writes = os.pipe()
    poller = select.poll()
    poller.register(reads, select.POLLIN)
    try:
        stay_awake(poller, since=time.perf_counter())  # or for ever
        assert poller.poll(0) == []
    finally:
        os.close(reads)
        os.close(writes)
