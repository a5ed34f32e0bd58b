"""Workers that do not see the driver's folder: who relays, what may be asked for, and that all arrives or nothing."""

import os
from functools import partial
from pathlib import Path

import pytest

from paceline.checkpoints import CheckpointStore, CheckpointStrategy, load, open_storage, snapshot
from paceline.checkpoints.content.files import CHUNK_BYTES, MemoryFile
from paceline.checkpoints.reading import load_through
from paceline.checkpoints.storage.base import Draft
from paceline.checkpoints.storage.landmark import Landmark, open_in_worker
from paceline.checkpoints.storage.local import LocalStorage
from paceline.checkpoints.storage.memory import MemoryStorage
from paceline.checkpoints.storage.relay import StorageRelay
from paceline.checkpoints.storage.relayed import RelayedStorage
from paceline.errors import CheckpointNotFoundError, CheckpointWriteError

MANIFEST = MemoryFile("checkpoint.json", [b"{}"])
DRAFT = Draft("one", "token")


@pytest.fixture
def root(tmp_path):
    return tmp_path / "checkpoints"


@pytest.fixture
def relay(root):
    relay = StorageRelay(LocalStorage(root), None)
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
    relay = StorageRelay(LocalStorage(root), None)
    for _ in range(2):
        assert isinstance(opener(relay.begin(), relay)(root), LocalStorage)


def test_worker_elsewhere_relays_even_if_it_has_a_folder_of_that_name(root, opener):
    relay = StorageRelay(LocalStorage(root), None)
    landmarks = relay.begin()
    assert isinstance(opener(elsewhere(landmarks), relay)(root), RelayedStorage)
    relay.close()
    assert isinstance(opener(landmarks, relay)(root), RelayedStorage)
    assert all_files(root) == [], "nothing stays behind"


def test_url_needs_no_relay(asking):
    relay = StorageRelay(open_storage("memory://somewhere"), "memory://else/checkpoint_000001")
    assert relay.begin() == ()
    with pytest.raises(PermissionError):
        asking(relay)(("names", "memory://somewhere"))


def test_memory_of_the_driver_is_in_nobodys_sight(root, opener):
    relay = StorageRelay(MemoryStorage(str(root)), None)
    assert isinstance(opener(relay.begin(), relay)(root), RelayedStorage)
    assert not root.exists()


def test_given_checkpoint_is_relayed_from_a_folder_that_is_not_the_runs_own(tmp_path, root, opener):
    given = CheckpointStore(tmp_path / "former")
    given.write(3, snapshot({"step": 7}))
    relay = StorageRelay(LocalStorage(root), given.path_of(3))
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
        far(given.root).put(DRAFT, [MANIFEST])
    assert os.listdir(given.root) == ["checkpoint_000003"]


def test_savers_of_two_ranks_that_both_relay(root, tmp_path, opener, driver):
    driver = driver(2, checkpoint_strategy=CheckpointStrategy(num_to_keep=1))
    asked = []
    far = opener(elsewhere(driver.landmarks), driver.saved.relay, asked)
    user_dir = tmp_path / "mine"
    (user_dir / "deep").mkdir(parents=True)
    (user_dir / "deep" / "notes.txt").write_text("kept")
    (user_dir / "empty").touch()
    savers = [driver.saver(rank, far) for rank in range(2)]
    for step in (1, 2):
        for rank, saver in enumerate(savers):
            saver.save({"step": step}, user_dir, {"per_rank": {"rank": rank}}, step)
    for saver in savers:
        saver.close()
    for rank, saver in enumerate(savers):
        checkpoint, _ = saver.load()
        assert (checkpoint, checkpoint.per_rank) == ({"step": 2}, {"rank": rank})
        assert (checkpoint.directory / "deep" / "notes.txt").read_text() == "kept"
        assert (checkpoint.directory / "empty").read_bytes() == b""
        assert not checkpoint.directory.is_relative_to(root)
    assert {request[0] for request in asked} == {"send", "put", "read", "get"}
    assert load(root / "checkpoint_000002") == {"step": 2}
    driver.saved.close()
    assert os.listdir(root) == ["checkpoint_000002"]


def test_many_small_files_travel_together_and_large_ones_in_pieces(root, relay, asking):
    asked = []
    storage, local = RelayedStorage(str(root), asking(relay, asked)), LocalStorage(root)
    small = [MemoryFile(f"files/{number}", [b"x"]) for number in range(100)]
    storage.put(DRAFT, small)
    assert [request[0] for request in asked] == ["send", "put"]
    big, second = os.urandom(3 * CHUNK_BYTES), Draft("big", "token")
    storage.put(second, [MemoryFile("a", [big])])
    sizes = [sum(len(data) for _, data in request[3]) for request in asked if request[0] == "send"]
    assert max(sizes) <= CHUNK_BYTES
    local.commit(DRAFT, MANIFEST, [file.name for file in small])
    local.commit(second, MANIFEST, ["a"])
    asked.clear()
    fetched = storage.fetch("one", [file.name for file in small])
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


@pytest.mark.parametrize("num_answered", [0, 1, 2])
def test_worker_dies_while_sending(root, relay, num_answered, asking):
    big = MemoryFile("a", [bytes(2 * CHUNK_BYTES)])
    with pytest.raises(SystemExit):
        RelayedStorage(str(root), Lossy(asking(relay), num_answered)).put(DRAFT, [big])
    with pytest.raises(FileNotFoundError):
        LocalStorage(root).commit(DRAFT, MANIFEST, ["a"])
    relay.begin()
    assert all_files(root) == [".paceline-driver"], "what was begun is thrown away"
    RelayedStorage(str(root), asking(relay)).put(DRAFT, [big])
    LocalStorage(root).commit(DRAFT, MANIFEST, ["a"])
    assert LocalStorage(root).names() == ["one"]


def test_worker_whose_putting_fails_has_the_rest_thrown_away(root, relay, asking):
    storage = RelayedStorage(str(root), asking(relay))
    storage.put(DRAFT, [MemoryFile("a", [b"1"])])
    with pytest.raises(FileExistsError):
        storage.put(DRAFT, [MemoryFile("b", [b"2"]), MemoryFile("a", [b"3"])])
    assert all_files(root) == [".one.token.draft", ".one.token.draft/a", ".paceline-driver"]
    assert (root / ".one.token.draft" / "a").read_bytes() == b"1", "it is another writer's"


def test_what_was_thrown_away_in_between_is_not_put_in_part(root, relay, asking):
    ask = asking(relay)
    ask(("send", str(root), "id", [("a", b"12")]))
    relay.begin()
    ask(("send", str(root), "id", [("a", b"34")]))
    with pytest.raises(OSError, match="Only 2 of 4 bytes"):
        ask(("put", str(root), "id", DRAFT, {"a": 4}))
    relay.begin()
    with pytest.raises(OSError, match="Nothing of it"):
        ask(("put", str(root), "id", DRAFT, {"a": 4}))
    assert all_files(root) == [".paceline-driver"]


def test_folder_that_refuses_is_a_write_error_on_the_worker(root, opener, driver):
    root.touch()
    driver = driver()
    [landmark] = driver.landmarks
    assert landmark.crc32 is None
    far = opener([landmark], driver.saved.relay)
    assert isinstance(far(root), RelayedStorage), "the driver knows best what is wrong with it"
    saver = driver.saver(0, far)
    saver._writer._sleep = lambda seconds: None
    saver.save({"step": 1}, None, None, 1)
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
        ("get", "{root}", "../other/secret", ["file"], 0),
        ("get", "{root}", Draft("../other/secret", "t"), ["file"], 0),
        ("get", "{root}", Draft("x", "/../../other/secret"), ["file"], 0),
        ("get", "{root}", Draft("x", "t"), ["../../other/secret/file"], 0),
        ("get", "{other}", "secret", ["file"], 0),
        ("send", "{root}", "id", [("../../../other/new", b"1")]),
        ("send", "{other}", "id", [("new", b"1")]),
        ("put", "{root}", "sent", Draft("../other/new", "t"), {"a": 1}),
        ("put", "{root}", "sent", Draft("x", "/../../other/new"), {"a": 1}),
        ("put", "{root}", "sent", Draft("", "t"), {"a": 1}),
        ("put", "{root}", "sent", Draft("x", "t"), {"../a": 1}),
        ("put", "{other}", "sent", Draft("new", "t"), {"a": 1}),
    ],
    ids=lambda request: " ".join(map(str, request)),
)
def test_nothing_outside_of_the_run_can_be_reached(tmp_path, root, relay, request_, asking):
    other = tmp_path / "other"
    (other / "secret").mkdir(parents=True)
    (other / "secret" / "file").write_text("private")
    before = all_files(other)
    asking(relay)(("send", str(root), "sent", [("a", b"1")]))

    def filled(value):
        if isinstance(value, str):
            return value.replace("{root}", str(root)).replace("{other}", str(other))
        return [filled(item) for item in value] if isinstance(value, list) else value

    with pytest.raises(PermissionError):
        asking(relay)(tuple(filled(value) for value in request_))
    assert all_files(other) == before
    assert root.exists()


@pytest.mark.parametrize("wish", ["sing", "commit", "discard", "delete", "sweep"])
def test_what_is_not_a_workers_to_ask_is_the_askers_error(relay, root, asking, wish):
    with pytest.raises(ValueError, match=f"cannot '{wish}'"):
        asking(relay)((wish, str(root)))


def test_what_goes_to_the_memory_of_the_driver_is_on_no_disk_on_the_way(root, tmp_path, asking, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    storage = MemoryStorage(str(root))
    ask, seen = asking(StorageRelay(storage, None)), []

    def watched(request):
        answer = ask(request)
        seen.append((request[0], os.listdir(tmp_path)))
        return answer

    data = bytes(range(256)) * (CHUNK_BYTES // 256)
    RelayedStorage(str(root), watched).put(DRAFT, [MemoryFile("a", [data, data]), MemoryFile("b", [b"1"])])
    assert seen == [("send", []), ("send", []), ("send", []), ("put", [])]
    storage.commit(DRAFT, MANIFEST, ["a", "b"])
    assert storage.read("one", "a") == data + data
