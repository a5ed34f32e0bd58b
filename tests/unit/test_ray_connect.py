"""Which cluster workers can be had of."""

import pytest

from paceline.errors import ResourcesError
from paceline.workers.ray import connect


def test_address_for_jobs_is_told_from_one_for_workers(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:1")
    monkeypatch.setattr("ray.is_initialized", lambda: False)  # whatever other tests have left
    with pytest.raises(
        ResourcesError, match=r"http://127.0.0.1:1.*paceline train launch.*HOST:6379.*unset RAY_ADDRESS"
    ):
        connect()
