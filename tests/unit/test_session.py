"""What the session functions do outside a run, and what they add by themselves."""

import socket

import pytest

from paceline import session
from paceline.errors import TrainerStateError


def test_host_is_looked_up_once(monkeypatch):
    """A name server that does not answer takes seconds."""
    asked = []
    monkeypatch.setattr(socket, "gethostname", lambda: "a-host-of-this-test")
    monkeypatch.setattr(socket, "gethostbyname", lambda name: asked.append(name) or "192.0.2.7")
    metrics = [session._detailed(total_s) for total_s in (1.0, 2.0)]
    assert [(one["_hostname"], one["_node_ip"]) for one in metrics] == [("a-host-of-this-test", "192.0.2.7")] * 2
    assert asked == ["a-host-of-this-test"]


def test_data_shard_outside_a_run_says_how_to_have_one():
    with pytest.raises(TrainerStateError, match=r"Trainer\(num_workers=0\)\.run\(train_func, dataset="):
        session.get_data_shard()
