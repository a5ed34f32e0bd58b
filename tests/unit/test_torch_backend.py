"""How a torch group is opened, without one."""

import os

import pytest
import torch

from paceline.backends import torch as backend
from paceline.errors import WorkerStartError
from paceline.testing import RecordingWire
from paceline.workers.base import Place


def test_address_that_rank_0_does_not_have():
    wire = RecordingWire(Place())
    wire.address = "203.0.113.7"  # of a block that is reserved for documentation
    with pytest.raises(WorkerStartError, match=r"cannot listen on 203\.0\.113\.7.*--node-ip-address"):
        backend.open_store(wire, 5)
    assert wire.shared == {}


def test_lookups_are_short_unless_the_user_says_how_long(monkeypatch):
    monkeypatch.delenv("RES_OPTIONS", raising=False)
    with backend._short_lookups():
        assert os.environ["RES_OPTIONS"].startswith("timeout:1 ")
    assert "RES_OPTIONS" not in os.environ
    monkeypatch.setenv("RES_OPTIONS", "timeout:9")
    with backend._short_lookups():
        assert os.environ["RES_OPTIONS"] == "timeout:9"
    assert os.environ["RES_OPTIONS"] == "timeout:9"


@pytest.mark.parametrize(("told", "expected"), [("3", 3), (None, 5), ("4,2", 5), ("0", 5)])
def test_worker_has_its_share_of_threads_and_leaves_them_as_they_were(monkeypatch, told, expected):
    """A list is for nested regions of OpenMP. What torch cannot be told is no reason not to join."""
    before = torch.get_num_threads()
    if told is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", told)
    torch.set_num_threads(5)
    wire = RecordingWire(Place())
    try:
        backend.use_own_threads(wire)
        assert torch.get_num_threads() == expected
        wire.leaving.close()
        assert torch.get_num_threads() == 5
    finally:
        torch.set_num_threads(before)
