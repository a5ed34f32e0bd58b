"""What a session adds to a report by itself."""

import socket

from paceline import session


def test_host_is_looked_up_once(monkeypatch):
    """A name server that does not answer takes seconds."""
    asked = []
    monkeypatch.setattr(socket, "gethostname", lambda: "a-host-of-this-test")
    monkeypatch.setattr(socket, "gethostbyname", lambda name: asked.append(name) or "192.0.2.7")
    metrics = [session._detailed(total_s) for total_s in (1.0, 2.0)]
    assert [(one["_hostname"], one["_node_ip"]) for one in metrics] == [("a-host-of-this-test", "192.0.2.7")] * 2
    assert asked == ["a-host-of-this-test"]
