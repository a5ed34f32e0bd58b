"""Committing, listing, pruning and loading; damage is noticed, and a missing checkpoint explained."""

import json
import os
import pickle
import shutil
import zlib
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch

from paceline.checkpoints import Checkpoint, CheckpointStore, CheckpointStrategy, copy, load, read_info, snapshot
from paceline.checkpoints.content.files import FileRecord, record_of
from paceline.checkpoints.manifest import MANIFEST_FILE, Manifest, damaged
from paceline.checkpoints.part import Part
from paceline.checkpoints.storage.local import LocalStorage
from paceline.errors import ArgumentError, CheckpointDamagedError, CheckpointError, CheckpointNotFoundError

STATE = {"epoch": 4, "model": torch.arange(100.0), "array": np.arange(10)}


@pytest.fixture(params=["local", "remote"])
def store(request, tmp_path):
    root = tmp_path if request.param == "local" else f"memory://{tmp_path.name}"
    return CheckpointStore(f"{root}/checkpoints")


@pytest.fixture
def folder(tmp_path):
    """A user's own directory, with everything that can be in one."""
    source = tmp_path / "mine"
    (source / "deep" / "er").mkdir(parents=True)
    (source / "weights.bin").write_bytes(b"\x00" * 100)
    (source / "deep" / "er" / "notes.txt").write_text("hello")
    (tmp_path / "outside.txt").write_text("linked")
    (source / "link.txt").symlink_to(tmp_path / "outside.txt")
    return source


def test_commit_and_load(store):
    info = store.write(3, snapshot(STATE), score=0.5, iteration=7)
    assert (info.id, info.score, info.iteration, info.path) == (3, 0.5, 7, store.path_of(3))
    assert info.path.endswith("/checkpoints/checkpoint_000003")
    back = load(info.path)
    assert back["epoch"] == 4
    assert torch.equal(back["model"], STATE["model"])
    assert back.path == info.path
    assert back.directory is None
    assert read_info(info.path) == info
    assert store.list() == [info]


def test_it_is_a_dict_and_prints_like_one(store):
    back = load(store.write(1, snapshot({"epoch": 4, "model": 10})).path)
    assert repr(back) == str(back) == "{'epoch': 4, 'model': 10}"
    assert back == {"epoch": 4, "model": 10}
    again = pickle.loads(pickle.dumps(back))
    assert (type(again), again, again.path) == (Checkpoint, back, back.path)


def test_info_survives_nan_and_inf(store):
    for id, score in enumerate([float("nan"), float("inf"), None], start=1):
        store.write(id, snapshot({}), score=score)
    assert [repr(info.score) for info in store.list()] == ["nan", "inf", "None"]


def test_directory_beside_state(store, folder):
    info = store.write(1, snapshot(STATE), directory=folder)
    shutil.rmtree(folder)
    back = load(info.path)
    files = {str(path.relative_to(back.directory)) for path in back.directory.rglob("*") if path.is_file()}
    assert files == {"weights.bin", "deep/er/notes.txt", "link.txt"}
    assert (back.directory / "deep/er/notes.txt").read_text() == "hello"
    assert (back.directory / "link.txt").read_text() == "linked"
    assert back["epoch"] == 4


def test_committed_files_are_not_the_users_files(tmp_path, folder):
    info = CheckpointStore(tmp_path / "c").write(1, snapshot({}), directory=folder)
    with open(folder / "weights.bin", "r+b") as file:
        file.write(b"changed")
    assert (load(info.path).directory / "weights.bin").read_bytes() == b"\x00" * 100


def test_remote_directory_outlives_the_checkpoint_object(folder):
    info = CheckpointStore(f"memory://{folder.parent.name}").write(1, snapshot({}), directory=folder)
    directory = load(info.path).directory
    assert (directory / "weights.bin").stat().st_size == 100


@pytest.mark.parametrize("kind", ["missing", "file", "empty", "loop", "fifo"])
def test_directory_that_cannot_be_saved(kind, tmp_path):
    path = tmp_path / "mine"
    if kind == "file":
        path.touch()
    elif kind != "missing":
        path.mkdir()
    if kind == "loop":
        (path / "up").symlink_to(path)
    if kind == "fifo":
        os.mkfifo(path / "pipe")
    with pytest.raises(ArgumentError, match="mine"):
        CheckpointStore(tmp_path / "c").write(1, snapshot({}), directory=path)
    assert CheckpointStore(tmp_path / "c").list() == []


def test_list_is_by_id_and_tolerates_foreign_and_torn_things(tmp_path):
    store = CheckpointStore(tmp_path)
    assert (store.list(), store.latest(), store.best(CheckpointStrategy())) == ([], None, None)
    for id in (10, 2, 1_000_000):
        store.write(id, snapshot({}))
    (tmp_path / "checkpoint_000004").mkdir()  # torn: no manifest
    (tmp_path / "checkpoint_000005").mkdir()
    (tmp_path / "checkpoint_000005" / "checkpoint.json").write_text("{")
    (tmp_path / "checkpoint_000006").write_text("a file")
    (tmp_path / "notes.txt").touch()
    (tmp_path / "best").symlink_to(store.path_of(2))
    assert [info.id for info in store.list()] == [2, 10, 1_000_000]
    assert store.latest().id == 1_000_000
    assert store.next_id() == 1_000_001


def test_next_id_counts_torn_ones(tmp_path):
    assert CheckpointStore(tmp_path).next_id() == 1
    (tmp_path / "checkpoint_000004").mkdir()
    assert CheckpointStore(tmp_path).next_id() == 5


def test_copied_checkpoint_goes_by_its_name(tmp_path):
    store = CheckpointStore(tmp_path)
    store.write(1, snapshot(STATE))
    shutil.copytree(store.path_of(1), store.path_of(9))
    assert [(info.id, info.path) for info in store.list()] == [(1, store.path_of(1)), (9, store.path_of(9))]
    shutil.copytree(store.path_of(1), tmp_path / "favourite")
    assert load(tmp_path / "favourite")["epoch"] == 4


def test_best_and_prune(store):
    strategy = CheckpointStrategy(2, "loss", "min")
    for id, loss in enumerate([0.5, 0.1, 0.9, 0.3, 0.7], start=1):
        store.write(id, snapshot({}), score=loss)
    assert store.best(strategy).id == 2
    assert sorted(info.id for info in store.prune(strategy)) == [1, 3]
    assert [info.id for info in store.list()] == [2, 4, 5]
    assert store.prune(CheckpointStrategy(0)) == []
    assert store.prune(CheckpointStrategy(None)) == []
    assert [info.id for info in store.list()] == [2, 4, 5]


def test_an_id_is_never_overwritten(store):
    store.write(1, snapshot({"x": 1}))
    with pytest.raises(FileExistsError):
        store.write(1, snapshot({"x": 2}))
    assert load(store.path_of(1)) == {"x": 1}


def test_missing_checkpoint_says_what_is_there_instead(store):
    for id in range(1, 9):
        store.write(id, snapshot({}))
    checkpoints = store.root
    for wrong in (store.path_of(99), checkpoints, checkpoints.rpartition("/")[0]):
        with pytest.raises(CheckpointNotFoundError) as caught:
            load(wrong)
        assert f"There is no checkpoint at {wrong}" in str(caught.value)
        assert f"one of the 8 checkpoints in {checkpoints}" in str(caught.value)
        assert store.path_of(8) in str(caught.value)
        with pytest.raises(CheckpointNotFoundError):
            read_info(wrong)


def test_nothing_there_at_all(tmp_path):
    with pytest.raises(CheckpointNotFoundError, match="nor is there another one"):
        load(tmp_path / "nowhere" / "checkpoint_000001")
    (tmp_path / "file.pt").touch()
    with pytest.raises(CheckpointNotFoundError, match=r"file\.pt"):
        load(tmp_path / "file.pt")
    with pytest.raises(ValueError, match="no checkpoint"):  # what the earlier systems raised
        load(str(tmp_path / "nowhere"))


def test_checkpoint_without_manifest_was_never_finished(store):
    info = store.write(1, snapshot(STATE))
    if info.path.startswith("memory"):
        fsspec.filesystem("memory").rm_file(info.path.removeprefix("memory:/") + "/checkpoint.json")
    else:
        (Path(info.path) / "checkpoint.json").unlink()
    assert store.list() == []
    with pytest.raises(CheckpointNotFoundError, match="never finished"):
        load(info.path)


@pytest.mark.parametrize("file", ["state.json", "arrays.safetensors", "files/weights.bin", "checkpoint.json"])
@pytest.mark.parametrize("damage", ["truncated", "extended", "flipped", "emptied"])
def test_damaged_file_is_named(file, damage, tmp_path, folder):
    info = CheckpointStore(tmp_path / "c").write(1, snapshot(STATE), directory=folder)
    path = Path(info.path) / file
    data = bytearray(path.read_bytes())
    if damage == "truncated":
        data = data[:-7]
    elif damage == "extended":
        data += b"more!"
    elif damage == "flipped":
        data[len(data) // 2] ^= 1
    else:
        data = b""
    path.write_bytes(data)
    with pytest.raises(CheckpointDamagedError, match=file) as caught:
        load(info.path)
    assert info.path in str(caught.value)
    if damage != "flipped" and file != "checkpoint.json":
        assert f"it has {len(data)} bytes, but" in str(caught.value)


def test_every_flipped_bit_of_the_arrays_is_noticed(tmp_path):
    info = CheckpointStore(tmp_path).write(1, snapshot({"x": torch.arange(4.0)}))
    path = Path(info.path) / "arrays.safetensors"
    good = path.read_bytes()
    for bit in range(len(good) * 8):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bad)
        with pytest.raises(CheckpointDamagedError):
            load(info.path)


@pytest.mark.parametrize("file", ["state.json", "arrays.safetensors", "files/weights.bin"])
def test_missing_file_is_named(file, tmp_path, folder):
    info = CheckpointStore(tmp_path / "c").write(1, snapshot(STATE), directory=folder)
    (Path(info.path) / file).unlink()
    with pytest.raises(CheckpointDamagedError, match=f"damaged: {file}: it is missing"):
        load(info.path)


def test_manifest_cannot_lead_out_of_the_checkpoint(tmp_path):
    info = CheckpointStore(tmp_path).write(1, snapshot({}))
    path = Path(info.path) / "checkpoint.json"
    honest = Manifest.from_bytes(path.read_bytes(), info.path)
    for name in ("files/../../../x", "/etc/passwd", ""):
        record = type(honest.files[0])(name, 1, 1)
        path.write_bytes(Manifest(1, 0.0, None, 0, (*honest.files, record)).to_bytes())
        with pytest.raises(CheckpointDamagedError, match="outside of the checkpoint"):
            load(info.path)


def test_newer_format_is_not_called_damaged(tmp_path):
    info = CheckpointStore(tmp_path).write(1, snapshot({}))
    path = Path(info.path) / "checkpoint.json"
    body = json.loads(path.read_text())
    del body["crc32"]
    body["version"] = 3
    body["crc32"] = zlib.crc32(json.dumps(body, sort_keys=True).encode())
    path.write_text(json.dumps(body))
    with pytest.raises(CheckpointError, match="format version 3") as caught:
        load(info.path)
    assert not isinstance(caught.value, CheckpointDamagedError)


def test_format_of_one_writer_is_read(tmp_path):
    info = CheckpointStore(tmp_path).write(1, snapshot({"epoch": 4}), score=0.5, iteration=7)
    path = Path(info.path) / "checkpoint.json"
    body = json.loads(path.read_text())
    for field in ("crc32", "world_size", "ranks"):
        del body[field]
    body["version"] = 1
    path.write_text(json.dumps(body | {"crc32": zlib.crc32(json.dumps(body, sort_keys=True).encode())}))
    assert read_info(info.path) == info
    back = load(info.path)
    assert (back, back.per_rank, back.all_ranks) == ({"epoch": 4}, None, [None])


def test_manifest_says_who_is_in_it():
    files = (FileRecord("state.json", 3, 1), FileRecord("ranks/2/state.json", 4, 2))
    manifest = Manifest(5, 1.5, None, 7, files, world_size=3, ranks=(0, 2))
    assert Manifest.from_bytes(manifest.to_bytes(), "here") == manifest
    assert (manifest.info("here").world_size, manifest.info("here").num_bytes) == (3, 7)


@pytest.mark.parametrize(("world_size", "ranks"), [(2, (0, 2)), (2, (-1, 0)), (0, ()), (10**9, (0,))])
def test_ranks_that_cannot_be_are_not_believed(world_size, ranks):
    data = Manifest(5, 1.5, None, 7, (), world_size, ranks).to_bytes()
    with pytest.raises(CheckpointDamagedError, match="there cannot be the ranks"):
        Manifest.from_bytes(data, "here")


def put_part(store, id, rank, files, iteration=0, score=None):
    store.put(id, files)
    return Part(id, rank, iteration, float(rank), tuple(map(record_of, files)), score)


def test_parts_of_several_ranks_make_one_checkpoint(store):
    shared, own = snapshot({"epoch": 4}), snapshot({"per_rank": {"rank": 2}})
    parts = [
        put_part(store, 1, 2, own.files("ranks/2/"), iteration=8),
        Part(1, 1, 8, 5.0),
        put_part(store, 1, 0, shared.files(), iteration=7, score=0.5),
    ]
    assert (store.list(), store.latest()) == ([], None)
    info = store.commit(parts, world_size=4)
    assert (info.iteration, info.score, info.time, info.world_size) == (7, 0.5, 0.0, 4), "rank 0's"
    assert store.list() == [info]
    back = load(info.path)
    assert (back, back.all_ranks) == ({"epoch": 4}, [None, None, {"rank": 2}, None])
    [own_file] = own.files("ranks/2/")
    place = Manifest.from_bytes(store.storage.read("checkpoint_000001", MANIFEST_FILE), "").place("checkpoint_000001")
    assert store.storage.read(place, "ranks/2/state.json") == bytes(own_file.parts[0])


def test_part_that_was_never_put_is_not_committed(store):
    part = put_part(store, 1, 0, snapshot({}).files())
    missing = Part(1, 1, 0, 0.0, (FileRecord("ranks/1/state.json", 2, 0),))
    with pytest.raises(FileNotFoundError):
        store.commit([part, missing], world_size=2)
    assert store.list() == []
    store.discard(1)
    store.discard(1)
    with pytest.raises(FileNotFoundError):
        store.commit([part], world_size=1)


def test_damaged_part_of_one_rank_is_named(tmp_path):
    store = CheckpointStore(tmp_path)
    parts = [
        put_part(store, 1, 0, snapshot({}).files()),
        put_part(store, 1, 1, snapshot({"per_rank": 1}).files("ranks/1/")),
    ]
    info = store.commit(parts, world_size=2)
    (tmp_path / "checkpoint_000001" / "ranks" / "1" / "state.json").write_bytes(b"{}")
    back = load(info.path)
    with pytest.raises(CheckpointDamagedError, match=r"ranks/1/state\.json"):
        back.parts()


def test_stores_of_one_folder_have_drafts_of_their_own(tmp_path):
    first, second = CheckpointStore(tmp_path), CheckpointStore(tmp_path)
    parts = [put_part(one, 1, 0, snapshot({"who": who}).files()) for who, one in enumerate((first, second))]
    second.commit([parts[1]], world_size=1)
    with pytest.raises(FileExistsError):
        first.commit([parts[0]], world_size=1)
    first.discard(1)
    assert load(first.path_of(1)) == {"who": 1}
    assert os.listdir(tmp_path) == ["checkpoint_000001"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_interrupted_write_leaves_nothing(tmp_path, error):
    class Interrupted(LocalStorage):
        def commit(self, draft, manifest, files):
            raise error

    with pytest.raises(error):
        CheckpointStore(tmp_path, Interrupted(tmp_path)).write(1, snapshot(STATE))
    assert os.listdir(tmp_path) == []


def test_errors_pickle():
    for error in (damaged("p", "f", "r"), CheckpointNotFoundError("x")):
        assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_store_travels_to_another_process(tmp_path):
    for root in (str(tmp_path), "memory://x"):
        assert pickle.loads(pickle.dumps(CheckpointStore(root))).root == root


def test_copy_is_a_checkpoint_of_its_own(store, folder, tmp_path):
    info = store.write(3, snapshot(STATE), score=0.5, iteration=7, directory=folder)
    target = tmp_path / "empty"
    target.mkdir()
    there = copy(info.path, target)
    store.storage.delete("checkpoint_000003")
    assert (there.path, there.iteration, there.time) == (str(target), 7, info.time)
    back = load(target)
    assert back["epoch"] == 4
    assert (back.directory / "deep/er/notes.txt").read_text() == "hello"
    copy(target, store.path_of(9))
    assert [(kept.id, kept.iteration) for kept in store.list()] == [(9, 7)]


def test_copy_never_overwrites_and_notices_damage(store, tmp_path):
    path = store.write(1, snapshot(STATE)).path
    copy(path, tmp_path / "copy")
    with pytest.raises(FileExistsError):
        copy(path, tmp_path / "copy")
    (tmp_path / "copy" / "state.json").write_bytes(b"{}")
    with pytest.raises(CheckpointDamagedError):
        copy(tmp_path / "copy", store.path_of(2))
    assert [info.id for info in store.list()] == [1]


def test_writer_of_an_attempt_that_was_given_up_comes_late(store):
    """Its number was given out again, and both write the same files."""
    late, new = CheckpointStore(store.root, token="late"), CheckpointStore(store.root, token="new")
    put_part(late, 1, 0, snapshot({"whose": "of the first attempt"}).files())
    late.discard(1)
    assert new.next_id() == 1
    part = put_part(new, 1, 0, snapshot({"whose": "new"}).files())
    put_part(late, 1, 0, snapshot({"whose": "of the first attempt"}).files())
    info = new.commit([part], world_size=1)
    assert load(info.path) == {"whose": "new"}


def test_checkpoint_behind_a_url_is_downloaded_by_hand(tmp_path, folder):
    info = CheckpointStore(f"memory://{tmp_path.name}").write(1, snapshot({"step": 1}), directory=folder)
    here = tmp_path / "downloaded" / "checkpoint_000001"
    fsspec.filesystem("memory").get(info.path, str(here), recursive=True)
    back = load(here)
    assert (back, back.path) == ({"step": 1}, str(here))
    assert sorted(os.listdir(back.directory)) == sorted(os.listdir(folder))
