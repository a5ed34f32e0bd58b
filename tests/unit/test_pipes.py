"""Who waits at a pipe stays awake for a moment, and no longer."""

import os
import select
import time
from types import SimpleNamespace

from paceline.workers import pipes
from paceline.workers.base import DIRECT, Asked, Resources, Size
from paceline.workers.local import BATCH_S, LocalGroup
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


class Noting:
    """Of which nothing can ever be read: keeps how long it was asked to wait."""

    def __init__(self):
        self.timeouts = []

    def poll(self, timeout):
        self.timeouts.append(timeout)
        return []


def group_of(poller):
    group = LocalGroup(Size(1, 1), Resources(), (), lambda: 1)
    line = SimpleNamespace(fd=3, messages=SimpleNamespace(closed=False))
    worker = SimpleNamespace(line=line, pidfd=4, events=lambda *asked: [], printed=lambda: [], has_answered=False)
    worker.answer = lambda number, value: None
    group._workers, group._poller = [worker], poller
    return group


def test_driver_stays_awake_for_who_was_answered_directly_alone():
    for number, is_awake in ((DIRECT, True), (1, False)):
        poller = Noting()
        group = group_of(poller)
        group.answer(Asked(0, number, "topic", None), "value")
        group.poll(1.0, lambda event: None)
        assert (poller.timeouts[-1], 0 in poller.timeouts) == (BATCH_S, is_awake)
        poller.timeouts.clear()
        group.answer(Asked(0, number, "topic", None), "value")
        group.poll(0.0, lambda event: None)
        assert poller.timeouts == [0.0], "who does not wait is not kept"
