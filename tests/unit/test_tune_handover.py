"""Two lives of a trial and one run folder: the idle one lets go, the busy one is left alone."""

import threading

import pytest

from paceline.runs import RunFolder
from paceline.search import handover


@pytest.fixture
def held(tmp_path):
    with RunFolder.create(tmp_path) as folder:
        yield folder


def test_folder_that_nobody_holds_is_reopened(held):
    held.close()
    folder = handover.claim(held.path)
    assert folder.path == held.path
    assert folder.first_attempt == 1
    folder.close()


def test_idle_holder_lets_go_when_asked(held):
    def let_go():
        held.set_state("STOPPED", reason="another one goes on")
        held.close()
        return True

    watch = handover.Watch(held.path, let_go)
    folder = handover.claim(held.path)
    watch.stop()
    assert folder is not None
    assert not (held.path / handover.REQUEST_FILE).exists()
    folder.close()


def test_busy_holder_keeps_the_folder(held):
    asked = threading.Event()

    def let_go():
        asked.set()
        return False

    watch = handover.Watch(held.path, let_go)
    assert handover.claim(held.path, patience_s=1.0) is None
    assert asked.is_set()
    watch.stop()
    assert not (held.path / handover.REQUEST_FILE).exists(), "a request that was given up does no harm later"


def test_holder_that_ended_is_asked_nothing(held):
    """Somebody asks again and again; when the watch is stopped, nobody is asked any more, nor still being asked."""
    (held.path / handover.REQUEST_FILE).touch()
    asked, has_ended, asked_in_time = threading.Event(), threading.Event(), []

    def let_go():
        asked.set()
        asked_in_time.append(not has_ended.wait(0.2))
        return False

    watch = handover.Watch(held.path, let_go)
    assert asked.wait(60)
    watch.stop()
    has_ended.set()
    assert asked_in_time
    assert all(asked_in_time)
