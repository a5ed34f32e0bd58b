"""What is reserved in a Ray cluster is given back."""

from types import SimpleNamespace

import pytest

from paceline.workers import ray_slots
from paceline.workers.ray_slots import Slots


def test_reservation_that_ctrl_c_hits_is_given_back(monkeypatch):
    """Ray has made it, and nobody has been told: the resources would be taken until the driver ends."""
    made = {}

    def placement_group(bundles, strategy="PACK", name=""):
        made[name] = SimpleNamespace(bundles=bundles)
        raise KeyboardInterrupt

    monkeypatch.setattr(ray_slots, "placement_group", placement_group)
    monkeypatch.setattr(ray_slots, "get_placement_group", lambda name: made[name])
    monkeypatch.setattr(ray_slots, "remove_placement_group", lambda group: made.clear())
    slots = Slots({"CPU": 1.0}, "PACK")
    for ask in (lambda: slots.grow(1), lambda: slots.ask_for(1)):
        with pytest.raises(KeyboardInterrupt):
            ask()
        assert not made
        assert len(slots) == 0
