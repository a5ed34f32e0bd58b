"""Workers that do not see the driver's folder: who relays, what may be asked for, and that all arrives or nothing."""

import os
from functools import partial
from pathlib import Path

import pytest
from paceline.checkpoints.savers import FollowingSaver, WritingSaver

from paceline.checkpoints import CheckpointStore, CheckpointStrategy, load, snapshot
from paceline.checkpoints.content.files import CHUNK_BYTES, MemoryFile
from paceline.checkpoints.storage.landmark import Landmark, open_in_worker
from paceline.checkpoints.storage.local import LocalStorage
from paceline.checkpoints.storage.relay import StorageRelay
from paceline.checkpoints.storage.relayed import RelayedStorage
from paceline.checkpoints.store import load_through
from paceline.errors import CheckpointNotFoundError, CheckpointWriteError

MANIFEST = MemoryFile("checkpoint.json", [b"{}"])


@pytest.fixture
def root(tmp_path):
    return tmp_path / "checkpoints"


@pytest.fixture
def relay(root):
    relay = StorageRelay(str(root), None)
    relay.begin()
    return relay


def elsewhere(landmarks):
    """What is left of the landmarks for a worker on another machine, which has a folder of the same name."""
    return [Landmark(one.root, one.path, one.crc32 ^ 1) for one in landmarks]


@pytest.fixture
def opener(asking):
    def opener(landmarks, relay, asked=None):
        return partial(open_in_worker, landmarks=landmarks, ask=asking(relay, asked))

    return opener


def all_files(root):
    return sorted(str(path.relative_to(root)) for path in Path(root).rglob("*"))


def test_worker_on_the_same_disk_asks_nobody(root, opener):
    relay = StorageRelay(str(root), None)
    for _ in range(2):
        assert isinstance(opener(relay.begin(), relay)(root), LocalStorage)


def test_worker_elsewhere_relays_even_if_it_has_a_folder_of_that_name(root, opener):
    relay = StorageRelay(str(root), None)
    landmarks = relay.begin()
    assert isinstance(opener(elsewhere(landmarks), relay)(root), RelayedStorage)
    relay.close()
    assert isinstance(opener(landmarks, relay)(root), RelayedStorage)
    assert all_files(root) == [], "nothing stays behind"


def test_url_needs_no_relay():
    relay = StorageRelay("memory://somewhere", "memory://else/checkpoint_000001")
    assert relay.begin() == ()


def test_given_checkpoint_is_relayed_from_a_folder_that_is_not_the_runs_own(tmp_path, root, opener):
    given = CheckpointStore(tmp_path / "former")
    given.write(3, snapshot({"step": 7}))
    relay = StorageRelay(None, given.path_of(3))
    landmarks = relay.begin()
    asked = []
    assert load_through(opener(landmarks, relay, asked), given.path_of(3)) == {"step": 7}
    assert asked == []
    far = opener(elsewhere(landmarks), relay, asked)
    assert load_through(far, given.path_of(3)) == {"step": 7}
    assert asked
    with pytest.raises(CheckpointNotFoundError, match=r"load one of the 1 checkpoints in .*former"):
        load_through(far, given.path_of(4))
    with pytest.raises(PermissionError):
        far(given.root).delete("checkpoint_000003")
    assert [info.id for info in given.list()] == [3]


def test_savers_of_two_ranks_that_both_relay(root, tmp_path, opener):
    relay = StorageRelay(str(root), None)
    far = opener(elsewhere(relay.begin()), relay)
    store = CheckpointStore(root, far(root))
    read = partial(load_through, far)
    user_dir = tmp_path / "mine"
    (user_dir / "deep").mkdir(parents=True)
    (user_dir / "deep" / "notes.txt").write_text("kept")
    (user_dir / "empty").touch()
    first = WritingSaver(None, store, CheckpointStrategy(num_to_keep=1), 1, lambda kind, value: None, load=read)
    second = FollowingSaver(None, store, 1, load=read)
    for step in (1, 2):
        first.save({"step": step}, user_dir, step)
        second.save({}, None, step)
    first.close()
    for checkpoint in (first.load(), second.load()):
        assert checkpoint == {"step": 2}
        assert (checkpoint.directory / "deep" / "notes.txt").read_text() == "kept"
        assert (checkpoint.directory / "empty").read_bytes() == b""
        assert not checkpoint.directory.is_relative_to(root)
    assert load(root / "checkpoint_000002") == {"step": 2}
    relay.close()
    assert os.listdir(root) == ["checkpoint_000002"]


def test_many_small_files_travel_together_and_large_ones_in_pieces(root, relay, asking):
    asked = []
    storage = RelayedStorage(str(root), asking(relay, asked))
    small = [MemoryFile(f"files/{number}", [b"x"]) for number in range(100)]
    storage.write("small", [*small, MANIFEST])
    assert [request[0] for request in asked] == ["put", "commit"]
    big = os.urandom(3 * CHUNK_BYTES)
    storage.write("big", [MemoryFile("a", [big]), MANIFEST])
    sizes = [sum(len(data) for _, data in request[3]) for request in asked if request[0] == "put"]
    assert max(sizes) <= CHUNK_BYTES
    asked.clear()
    fetched = storage.fetch("small", [file.name for file in small])
    assert [request[0] for request in asked] == ["get"]
    assert len(list((fetched.path / "files").iterdir())) == 100
    fetched.discard()
    fetched = storage.fetch("big", ["a", "checkpoint.json"])
    assert (fetched.path / "a").read_bytes() == big
    fetched.discard()
    assert not fetched.path.exists()


class Lossy:
    """Loses the n-th question for good, as when a worker dies before it; all later ones, too."""

    def __init__(self, ask, num_answered):
        self._ask, self._num_left = ask, num_answered

    def __call__(self, request):
        self._num_left -= 1
        if self._num_left < 0:
            raise SystemExit
        return self._ask(request)


@pytest.mark.parametrize("num_answered", [0, 1, 2, 3])
def test_worker_dies_while_sending(root, relay, num_answered, asking):
    big = MemoryFile("a", [bytes(2 * CHUNK_BYTES)])
    with pytest.raises(SystemExit):
        RelayedStorage(str(root), Lossy(asking(relay), num_answered)).write("one", [big, MANIFEST])
    assert LocalStorage(root).names() == []
    relay.begin()
    assert all_files(root) == [".paceline-driver"], "what was begun is thrown away"
    RelayedStorage(str(root), asking(relay)).write("one", [big, MANIFEST])
    assert LocalStorage(root).names() == ["one"]


def test_what_was_thrown_away_in_between_is_not_committed_in_part(root, relay, asking):
    ask = asking(relay)
    ask(("put", str(root), "id", [("a", b"12")]))
    relay.begin()
    ask(("put", str(root), "id", [("a", b"34")]))
    with pytest.raises(OSError, match="Only 2 of 4 bytes"):
        ask(("commit", str(root), "id", "one", {"a": 4}))
    relay.begin()
    with pytest.raises(OSError, match="Nothing of it"):
        ask(("commit", str(root), "id", "one", {"a": 4}))
    assert LocalStorage(root).names() == []


def test_folder_that_refuses_is_a_write_error_on_the_worker(tmp_path, opener):
    (tmp_path / "file").touch()
    root = tmp_path / "file" / "checkpoints"
    relay = StorageRelay(str(root), None)
    [landmark] = relay.begin()
    assert landmark.crc32 is None
    storage = opener([landmark], relay)(root)
    assert isinstance(storage, RelayedStorage), "the driver knows best what is wrong with it"
    saver = WritingSaver(None, CheckpointStore(root, storage), CheckpointStrategy(), 1, lambda kind, value: None)
    saver._writer._sleep = lambda seconds: None
    saver.save({"step": 1}, None, 1)
    with pytest.raises(CheckpointWriteError, match=r"could not be written after 3 attempts: .*Not a directory"):
        saver.close()


@pytest.mark.parametrize(
    "request_",
    [
        ("read", "{other}", "secret", "file"),
        ("names", "{other}"),
        ("names", "{root}/../other"),
        ("read", "{root}", "..", "other/secret/file"),
        ("read", "{root}", "../other/secret", "file"),
        ("read", "{root}", "x", "../../other/secret/file"),
        ("get", "{root}", "x", ["{other}/secret/file"], 0),
        ("put", "{root}", "id", [("../../../other/new", b"1")]),
        ("commit", "{root}", "id", "../other/new", {}),
        ("delete", "{root}", "../other"),
        ("delete", "{root}", ""),
        ("delete", "{other}", "secret"),
    ],
    ids=lambda request: " ".join(map(str, request)),
)
def test_nothing_outside_of_the_run_can_be_reached(tmp_path, root, relay, request_, asking):
    other = tmp_path / "other"
    (other / "secret").mkdir(parents=True)
    (other / "secret" / "file").write_text("private")
    before = all_files(other)

    def filled(value):
        if isinstance(value, str):
            return value.replace("{root}", str(root)).replace("{other}", str(other))
        return [filled(item) for item in value] if isinstance(value, list) else value

    with pytest.raises(PermissionError):
        asking(relay)(tuple(filled(value) for value in request_))
    assert all_files(other) == before
    assert root.exists()


def test_unknown_question_is_the_askers_error(relay, root, asking):
    with pytest.raises(ValueError, match="cannot 'sing'"):
        asking(relay)(("sing", str(root)))
