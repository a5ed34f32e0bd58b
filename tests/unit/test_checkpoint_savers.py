"""What saving and loading mean on each rank."""

import pytest

from paceline.checkpoints import CheckpointStore, CheckpointStrategy, savers
from paceline.checkpoints.savers import FollowingSaver, MemorySaver, WritingSaver
from paceline.errors import ArgumentError, CheckpointNotFoundError, CheckpointValueError


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "checkpoints")


def rank_0(store, sent=None, first_id=1, resume_from=None, **strategy):
    sent = [] if sent is None else sent
    return WritingSaver(
        resume_from, store, CheckpointStrategy(**strategy), first_id, lambda kind, value: sent.append(kind)
    )


def test_all_ranks_load_what_rank_0_saved(store):
    writer, follower = rank_0(store), FollowingSaver(None, store, 1)
    assert writer.load() is follower.load() is None
    writer.save({"step": 1}, None, iteration=1)
    follower.save({"step": -1}, None, iteration=1)
    assert writer.load() == follower.load() == {"step": 1}


def test_before_the_first_save_all_load_what_the_run_started_from(store):
    first = rank_0(store)
    first.save({"step": 5}, None, 1)
    first.close()
    path = store.path_of(1)
    for given in (path, {"step": 5}):
        assert rank_0(store, first_id=2, resume_from=given).load() == {"step": 5}
        assert FollowingSaver(given, store, 2).load() == {"step": 5}
        assert MemorySaver(given, None).load() == {"step": 5}


def test_checkpoint_that_other_ranks_resume_from_is_not_pruned(store):
    first = rank_0(store)
    first.save({"step": 1}, None, 1)
    first.close()
    again = rank_0(store, first_id=2, resume_from=store.path_of(1), num_to_keep=1)
    for step in (2, 3):
        again.save({"step": step}, None, step)
    again.close()
    assert [info.id for info in store.list()] == [1, 3]
    assert FollowingSaver(store.path_of(1), store, 2).load() == {"step": 1}


def test_follower_takes_a_newer_one_when_its_own_is_pruned(store):
    writer, follower = rank_0(store, num_to_keep=1), FollowingSaver(None, store, 1)
    follower.save({}, None, 1)
    for step in (1, 2, 3):
        writer.save({"step": step}, None, step)
    writer.close()
    assert follower.load() == {"step": 3}


def test_rank_0_does_not_save(store, monkeypatch):
    monkeypatch.setattr(savers, "FOLLOW_TIMEOUT_S", 0.0)
    follower = FollowingSaver(None, store, 1)
    follower.save({}, None, 1)
    with pytest.raises(CheckpointNotFoundError, match="equally often on all ranks, or on rank 0 alone"):
        follower.load()


def test_driver_is_told_when_saving_begins_and_how_it_ends(store):
    sent = []
    writer = rank_0(store, sent)
    writer.save({"step": 1}, None, 1)
    writer.close()
    assert sent == ["saving", "committed"]
    writer = rank_0(store, sent := [], first_id=2)
    with pytest.raises(CheckpointValueError):
        writer.save({"model": object()}, None, 1)
    assert sent == ["saving", "save_failed"]


def test_memory_keeps_a_copy_and_hands_it_on():
    kept = []
    saver = MemorySaver(None, kept.append)
    state = {"items": [1]}
    saver.save(state, None, iteration=3)
    state["items"].append(2)
    assert saver.load() == {"items": [1]}
    assert kept == [({"items": [1]}, 3)]
    with pytest.raises(ArgumentError, match="kept in memory"):
        saver.save({}, "some_dir", 4)
