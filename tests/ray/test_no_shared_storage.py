"""Workers on a machine that does not see the driver's disk: checkpoints travel through Ray, and arrive whole."""

import json
import sys
from pathlib import Path

import pytest
from two_machines import two_machines

NAMES = (
    "look", "killed", "killed_large", "given", "given_in_memory", "files", "files_again", "full", "refused", "failed",
    "both",
)  # fmt: skip


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """What the program tells of each of its runs. It is on the machine whose results nobody else sees."""
    results = tmp_path_factory.mktemp("hidden")
    program = Path(__file__).with_name("no_shared_storage.py")
    with two_machines(hidden=[results]) as (_, second):
        said = second.run([sys.executable, program, results])
    lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    return dict(zip(NAMES, lines, strict=True))


def test_workers_are_elsewhere_and_see_nothing(story):
    assert story["look"]["values"] == [{"host": "machine-1", "sees": False}] * 2


def test_worker_is_killed_and_all_go_on_from_rank_0s_checkpoint(story):
    on_far = {"begin": 2, "step": 4, "mean": 4.0, "on": "machine-1"}
    for name in ("killed", "killed_large"):
        assert story[name]["values"] == [on_far] * 2
    assert story["killed_large"]["on_disk"] == {"1": 1, "2": 2, "3": 3, "4": 4}


def test_old_checkpoints_are_deleted_on_the_drivers_disk(story):
    assert story["killed"]["on_disk"] == {"4": 4}, "what ranks may have resumed from is spared only while the run lasts"


def test_checkpoint_that_was_given_to_the_run(story):
    assert story["given"]["values"] == story["given_in_memory"]["values"] == [4, 4]


def test_users_files_travel_both_ways(story):
    mine = {"deep/notes.txt": "of rank 0", "empty": ""}
    assert story["files"]["values"] == [[None, mine]] * 2
    assert story["files_again"]["values"] == [[mine, mine]] * 2
    assert story["files_again"]["read"] == mine


def test_disk_full_on_the_drivers_machine(story):
    said, step = story["full"]["values"][0]
    assert "checkpoint_000002 could not be written after 3 attempts: [Errno 28] No space left on device" in said
    assert "Free space there: " in said
    assert step == 3
    assert story["full"]["on_disk"] == {"1": 1, "3": 3}


def test_folder_refuses_on_the_drivers_machine(story):
    assert story["refused"]["error"].startswith("CheckpointWriteError: The checkpoint ")
    assert "Not a directory" in story["refused"]["error"]


def test_checkpoint_on_its_way_arrives_before_a_failed_run_ends(story):
    assert story["failed"]["error"].startswith("KeyError")
    assert story["failed"]["on_disk"] == {"1": 1, "2": 2}


def test_one_rank_sees_the_folder_and_the_other_does_not(story):
    values = story["both"]["values"]
    assert sorted(value.pop("on") for value in values) == ["machine-1", "machine-2"]
    assert values == [{"begin": 2, "step": 4, "mean": 4.0}] * 2
    assert story["both"]["on_disk"] == {"1": 1, "2": 2, "3": 3, "4": 4}


def test_nothing_else_is_left_in_the_folders(story):
    assert [run["left"] for run in story.values()] == [[]] * len(story)
