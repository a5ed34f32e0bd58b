"""Groups on several nodes: the places of their workers, and nodes that die."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "several_nodes.py"


@pytest.fixture(scope="module")
def story():
    """What several_nodes.py went through. Ray shall notice there soon that a node is gone."""
    soon = {"initial_delay_ms": 1000, "period_ms": 500, "failure_threshold": 4}
    env = {**os.environ, **{f"RAY_health_check_{name}": str(value) for name, value in soon.items()}}
    done = subprocess.run([sys.executable, PROGRAM], capture_output=True, text=True, env=env, timeout=170)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def nodes_of(workers):
    return [worker["node"] for worker in workers]


def check_places(workers):
    """In rank order, each node's workers one after the other."""
    assert [worker["rank"] for worker in workers] == list(range(len(workers)))
    nodes = list(dict.fromkeys(nodes_of(workers)))
    local_ranks = [rank for node in nodes for rank in range(nodes_of(workers).count(node))]
    assert [worker["local_rank"] for worker in workers] == local_ranks, "ranks run through one node, then the next"
    for worker in workers:
        assert worker["node_rank"] == nodes.index(worker["node"])
        assert worker["local_world_size"] == nodes_of(workers).count(worker["node"])


def test_packed_workers_fill_one_node_after_the_other(story):
    check_places(story["packed"])
    assert [worker["local_rank"] for worker in story["packed"]] == [0, 1, 0, 1]


def test_spread_workers_are_on_many_nodes(story):
    check_places(story["spread"])
    assert [worker["node_rank"] for worker in story["spread"]] == [0, 1, 2]


def test_torch_group_spans_the_nodes_at_an_address_that_ray_uses_too(story):
    assert {worker["total"] for worker in story["spread"]} == {3.0}
    address = story["addresses"][story["spread"][0]["node"]]
    assert {worker["master"] for worker in story["spread"]} == {address}


def test_node_dies_and_another_has_room(story):
    before, after = story["spread"], story["spread_again"]
    assert story["killed"] in nodes_of(before)
    assert story["killed"] not in nodes_of(after)
    check_places(after)
    assert {worker["total"] for worker in after} == {3.0}
    survivors = {worker["pid"] for worker in before if worker["node"] != story["killed"]}
    assert len(survivors) == 2
    assert survivors < {worker["pid"] for worker in after}, "they keep their process"
    assert story["steps"] == [[step] * 3 for step in range(1, 7)], "it went on from its checkpoint"
    assert len(story["reasons"]) == 1, "one death is one restart"


def test_node_dies_and_there_is_no_room(story):
    """Said after `start_timeout_s`; or at once, when a worker was first sent to the node and did not arrive there."""
    waited = "could not be placed within 2 s. The cluster has 2 CPU; free: nothing."
    at_once = "need 4 CPU; the whole cluster has 2 CPU on 1 node(s)."
    said = [f"ResourcesError: 4 workers with 1 CPU each {what}" for what in (waited, at_once)]
    assert story["no_room"].startswith(tuple(said)), story["no_room"]
    assert story["state"] == "FAILED"
    assert len(story["alive"]) == 1
