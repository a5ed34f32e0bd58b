"""Which cluster workers can be had of."""

import re
from types import SimpleNamespace

import pytest

from paceline.errors import ResourcesError
from paceline.workers import ray_connection
from paceline.workers.ray_connection import connect


def test_address_for_jobs_is_told_from_one_for_workers(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:1")
    monkeypatch.setattr("ray.is_initialized", lambda: False)  # whatever other tests have left
    with pytest.raises(
        ResourcesError, match=r"http://127.0.0.1:1.*paceline train launch.*HOST:6379.*unset RAY_ADDRESS"
    ):
        connect()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "[::1]:1", "nowhere.invalid:6379", "127.0.0.1:99999999"])
def test_address_where_nobody_is(address, monkeypatch):
    """Ray itself would try for minutes."""
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.init", lambda **_: pytest.fail("it was asked"))
    with pytest.raises(ResourcesError, match=rf"RAY_ADDRESS is {re.escape(address)}, but no Ray cluster answers there"):
        connect()


@pytest.mark.parametrize("address", ["auto", "local", "ray://127.0.0.1:1", ""])
def test_other_addresses_are_for_ray_to_judge(address, monkeypatch):
    asked = []
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.init", lambda **options: asked.append(options))
    connect()
    assert len(asked) == 1


def test_connection_of_a_client_is_known_without_asking_its_server(monkeypatch):
    """Which may be out of reach for a moment, in a poll that would have gone on."""

    def ask():
        raise ConnectionError("the server is out of reach")

    client = SimpleNamespace(client_worker=SimpleNamespace(_client_id="first"))
    monkeypatch.setattr(ray_connection.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray_connection.ray, "get_runtime_context", ask)
    monkeypatch.setattr(ray_connection.ray.util.client.ray, "get_context", lambda: client)
    first = ray_connection.connection()
    assert first == ray_connection.connection()
    client.client_worker._client_id = "second"
    assert ray_connection.connection() not in (first, None)
