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
    asked = threading.Event()
    watch = handover.Watch(held.path, lambda: asked.set() or True)
    watch.stop()
    (held.path / handover.REQUEST_FILE).touch()
    assert not asked.is_set()
