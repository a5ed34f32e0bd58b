"""How a torch group is opened, without one."""

import os

import pytest

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
