"""One suite for every kind of storage: a set of files comes about in two phases, and is there as a whole or not at all.

The implementations are found, not listed: a new module in `paceline.checkpoints.storage` needs a maker here.
"""

import errno
import importlib
import inspect
import os
import pkgutil
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Barrier

import pytest

import paceline.checkpoints.storage as package
from paceline.checkpoints import CheckpointStore, Storage
from paceline.checkpoints.content.files import CHUNK_BYTES, DiskFile, MemoryFile, record_of
from paceline.checkpoints.manifest import MANIFEST_FILE, Manifest
from paceline.checkpoints.storage.base import Draft
from paceline.checkpoints.storage.fsspec import FsspecStorage
from paceline.checkpoints.storage.local import LocalStorage
from paceline.checkpoints.storage.memory import MemoryStorage
from paceline.checkpoints.storage.relay import StorageRelay
from paceline.checkpoints.storage.relayed import RelayedStorage

NAME = "checkpoint_000001"
DRAFT = Draft(NAME, "a")
MEMBERS = sorted(name for name in vars(Storage) if not name.startswith("_"))


@dataclass(frozen=True)
class Sides:
    """One place seen from both sides: the driver commits, discards and deletes; workers put and read."""

    driver: Storage
    worker: Storage


@dataclass(frozen=True)
class Maker:
    kind: type
    label: str
    make: Callable[..., Sides]


def make_local(tmp_path, asking):
    return Sides(LocalStorage(tmp_path / "root"), LocalStorage(tmp_path / "root"))


def make_fsspec(tmp_path, asking):
    url = f"memory://{secrets.token_hex(8)}/root"
    return Sides(FsspecStorage(url), FsspecStorage(url))


def make_memory(tmp_path, asking):
    storage = MemoryStorage(str(tmp_path / "root"))
    return Sides(storage, storage)


def make_relayed_folder(tmp_path, asking):
    return relayed(LocalStorage(tmp_path / "root"), asking)


def make_relayed_memory(tmp_path, asking):
    return relayed(MemoryStorage(str(tmp_path / "root")), asking)


def relayed(storage, asking):
    relay = StorageRelay(storage, None)
    relay.begin()
    return Sides(storage, RelayedStorage(storage.root, asking(relay)))


MAKERS = [
    Maker(LocalStorage, "local", make_local),
    Maker(FsspecStorage, "fsspec", make_fsspec),
    Maker(MemoryStorage, "memory", make_memory),
    Maker(RelayedStorage, "relayed to a folder", make_relayed_folder),
    Maker(RelayedStorage, "relayed to memory", make_relayed_memory),
]


def classes_in_the_package():
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        for kind in vars(importlib.import_module(module.name)).values():
            if inspect.isclass(kind) and kind.__module__ == module.name and kind is not Storage:
                yield kind


def missing_members(kind):
    return [name for name in MEMBERS if not hasattr(kind, name)]


def all_makers():
    """Those we have, and for each storage without one, one that fails."""
    found = [kind for kind in classes_in_the_package() if not missing_members(kind)]
    known = {maker.kind for maker in MAKERS}
    return [*MAKERS, *(Maker(kind, kind.__name__, no_maker(kind)) for kind in found if kind not in known)]


def no_maker(kind):
    def make(tmp_path, asking):
        pytest.fail(
            f"{kind.__module__}.{kind.__name__} is a Storage, and has no maker in MAKERS of this suite: add one"
        )

    return make


@pytest.fixture(params=all_makers(), ids=lambda maker: maker.label)
def sides(request, tmp_path, asking):
    return request.param.make(tmp_path, asking)


@pytest.fixture(params=[m for m in all_makers() if m.kind is not FsspecStorage], ids=lambda maker: maker.label)
def sides_apart(request, tmp_path, asking):
    """Those where a draft is not in the place of the set that it becomes: all but what is behind a URL."""
    return request.param.make(tmp_path, asking)


class BrokenFile:
    """Yields some content, then fails as a full disk does."""

    def __init__(self, name="broken.bin"):
        self.name = name

    def chunks(self):
        yield memoryview(b"some")
        raise OSError(errno.ENOSPC, "No space left on device")


def files_of(**content):
    return [MemoryFile(name, [data]) for name, data in content.items()]


def manifest_of(files, folder=""):
    records = tuple(record_of(file) for file in files)
    return MemoryFile(MANIFEST_FILE, [Manifest(1, 0.0, None, 0, records, folder=folder).to_bytes()])


def commit(sides, draft, files):
    manifest = manifest_of(files, sides.driver.folder_of(draft))
    sides.driver.commit(draft, manifest, [file.name for file in files])


def put_and_commit(sides, draft, files):
    sides.worker.put(draft, files)
    commit(sides, draft, files)


def content(storage, source, names):
    if not isinstance(source, Draft):
        source = Manifest.from_bytes(storage.read(source, MANIFEST_FILE), source).place(source)
    fetched = storage.fetch(source, names)
    try:
        return {name: (fetched.path / name).read_bytes() for name in names}
    finally:
        fetched.discard()


def listed(sides):
    """The ids that both sides see."""
    stores = [CheckpointStore(side.root, side) for side in (sides.driver, sides.worker)]
    seen = {tuple(info.id for info in store.list()) for store in stores}
    seen |= {() if store.latest() is None else (store.latest().id,) for store in stores}
    [ids] = seen
    return list(ids)


def test_root_is_claimed_once(sides):
    if isinstance(sides.worker, RelayedStorage):
        with pytest.raises(PermissionError):
            sides.worker.claim()
        return
    sides.driver.claim()
    assert listed(sides) == []
    with pytest.raises(FileExistsError):
        sides.driver.claim()
    put_and_commit(sides, DRAFT, files_of(a=b"1"))
    assert listed(sides) == [1]


def test_root_that_has_a_checkpoint_is_not_claimed(sides):
    put_and_commit(sides, DRAFT, files_of(a=b"1"))
    with pytest.raises(FileExistsError):
        sides.driver.claim()


def test_every_storage_is_found_and_has_a_maker():
    kinds = list(classes_in_the_package())
    found = {kind for kind in kinds if not missing_members(kind)}
    half = {kind.__name__: missing_members(kind) for kind in kinds if kind.__name__.endswith("Storage")}
    assert not {name: lacks for name, lacks in half.items() if lacks}, "called a storage, and is none"
    assert {maker.kind for maker in MAKERS} == found, "see MAKERS"


def test_both_sides_have_one_name_for_a_place(sides):
    assert sides.worker.root == sides.driver.root
    assert sides.worker.path_of("one") == sides.driver.path_of("one") == f"{sides.driver.root}/one"


def test_nothing_is_there(sides):
    assert sides.worker.names() == sides.driver.names() == []
    assert listed(sides) == []
    with pytest.raises(FileNotFoundError):
        sides.worker.read(NAME, MANIFEST_FILE)
    for source in (NAME, DRAFT):
        with pytest.raises(FileNotFoundError):
            content(sides.worker, source, ["a"])


def test_draft_is_not_seen_until_it_is_committed(sides):
    files = files_of(a=b"1234")
    sides.worker.put(DRAFT, files)
    assert listed(sides) == []
    with pytest.raises(FileNotFoundError):
        sides.worker.read(NAME, MANIFEST_FILE)
    commit(sides, DRAFT, files)
    assert listed(sides) == [1]
    assert sides.worker.names() == sides.driver.names() == [NAME]
    assert content(sides.worker, NAME, ["a"]) == {"a": b"1234"}


def test_draft_has_no_name(sides_apart):
    sides_apart.worker.put(DRAFT, files_of(a=b"1"))
    assert sides_apart.worker.names() == sides_apart.driver.names() == []


def test_draft_behind_a_url_keeps_its_number_from_being_given_out_again(tmp_path, asking):
    sides = make_fsspec(tmp_path, asking)
    sides.worker.put(DRAFT, files_of(a=b"1"))
    assert CheckpointStore(sides.driver.root).next_id() == 2


def test_parts_of_many_writers_make_one_set(sides):
    num_writers = 8
    start = Barrier(num_writers)
    parts = [[MemoryFile(f"ranks/{rank}/{n}", [b"%d.%d" % (rank, n)]) for n in range(5)] for rank in range(num_writers)]

    def write(files):
        start.wait(60)
        sides.worker.put(DRAFT, files)

    with ThreadPoolExecutor(num_writers) as pool:
        list(pool.map(write, parts))
    files = [file for part in parts for file in part]
    commit(sides, DRAFT, files)
    assert listed(sides) == [1]
    expected = {file.name: file.parts[0] for file in files}
    assert content(sides.worker, NAME, list(expected)) == expected


def test_draft_and_set_have_the_same_bytes(sides):
    files = [
        MemoryFile("a.bin", [b"12", memoryview(b"34")]),
        MemoryFile("empty", []),
        MemoryFile("files/x/y/deep", [b"5"]),
        MemoryFile("files/x/empty", [b""]),
        MemoryFile("chunk", [os.urandom(CHUNK_BYTES)]),
        MemoryFile("large", [os.urandom(CHUNK_BYTES), os.urandom(3)]),
    ]
    names = [file.name for file in files]
    expected = {file.name: b"".join(file.parts) for file in files}
    sides.worker.put(DRAFT, files)
    assert content(sides.worker, DRAFT, names) == expected
    commit(sides, DRAFT, files)
    assert content(sides.worker, NAME, names) == content(sides.driver, NAME, names) == expected
    assert content(sides.worker, NAME, ["empty"]) == {"empty": b""}


def test_what_was_fetched_from_a_draft_outlives_it(sides):
    files = files_of(a=b"1")
    sides.worker.put(DRAFT, files)
    fetched = sides.worker.fetch(DRAFT, ["a"])
    commit(sides, DRAFT, files)
    assert (fetched.path / "a").read_bytes() == b"1"
    fetched.discard()
    assert content(sides.worker, NAME, ["a"]) == {"a": b"1"}, "it was not the set that went"


def test_files_from_a_workspace(sides):
    with sides.worker.workspace() as workspace:
        (workspace.path / "x").write_bytes(b"from disk")
        put_and_commit(sides, DRAFT, [DiskFile("files/x", workspace.path / "x")])
    assert not workspace.path.exists()
    assert content(sides.worker, NAME, ["files/x"]) == {"files/x": b"from disk"}


def test_file_is_missing_when_it_is_committed(sides):
    here, late = files_of(a=b"1"), files_of(b=b"2")
    sides.worker.put(DRAFT, here)
    with pytest.raises(FileNotFoundError):
        commit(sides, DRAFT, here + late)
    assert listed(sides) == []
    sides.worker.put(DRAFT, late)
    commit(sides, DRAFT, here + late)
    assert content(sides.worker, NAME, ["a", "b"]) == {"a": b"1", "b": b"2"}


def test_draft_without_files(sides):
    commit(sides, DRAFT, [])
    assert listed(sides) == [1]


def test_committed_twice(sides):
    files = files_of(a=b"1")
    put_and_commit(sides, DRAFT, files)
    with pytest.raises(FileExistsError):
        commit(sides, DRAFT, files)
    assert content(sides.worker, NAME, ["a"]) == {"a": b"1"}


def test_taken_name_is_left_alone(sides):
    put_and_commit(sides, DRAFT, files_of(a=b"old"))
    manifest = sides.worker.read(NAME, MANIFEST_FILE)
    with pytest.raises(FileExistsError):
        put_and_commit(sides, Draft(NAME, "b"), files_of(a=b"newer", b=b"more"))
    sides.driver.discard(Draft(NAME, "b"))
    assert content(sides.worker, NAME, ["a"]) == {"a": b"old"}
    assert sides.worker.read(NAME, MANIFEST_FILE) == manifest
    with pytest.raises(FileNotFoundError):
        sides.worker.read(NAME, "b")


def test_disk_full_while_putting(sides):
    others, mine = files_of(other=b"0"), files_of(a=b"1")
    sides.worker.put(DRAFT, others)
    with pytest.raises(OSError, match="No space left"):
        sides.worker.put(DRAFT, [*mine, BrokenFile("ranks/1/broken.bin")])
    for name in ("a", "ranks/1/broken.bin"):
        with pytest.raises(FileNotFoundError):
            content(sides.worker, DRAFT, [name])
        with pytest.raises(FileNotFoundError):
            sides.driver.commit(DRAFT, manifest_of([]), [name])
    again = [*mine, MemoryFile("ranks/1/broken.bin", [b"whole"])]
    sides.worker.put(DRAFT, again)
    commit(sides, DRAFT, [*others, *again])
    assert content(sides.worker, NAME, ["other", "a", "ranks/1/broken.bin"]) == {
        "other": b"0",
        "a": b"1",
        "ranks/1/broken.bin": b"whole",
    }


def test_disk_full_while_committing(sides):
    files = files_of(a=b"1")
    sides.worker.put(DRAFT, files)
    with pytest.raises(OSError, match="No space left"):
        sides.driver.commit(DRAFT, BrokenFile(MANIFEST_FILE), ["a"])
    assert listed(sides) == []
    commit(sides, DRAFT, files)
    assert listed(sides) == [1]


def test_drafts_of_two_attempts_do_not_mix(sides):
    """A machine that counts as lost may go on writing, also after what it wrote was dropped."""
    second = Draft(NAME, "b")
    sides.worker.put(DRAFT, files_of(a=b"from the dead", old=b""))
    sides.worker.put(second, files_of(a=b"1"))
    assert content(sides.worker, DRAFT, ["a"]) == {"a": b"from the dead"}
    with pytest.raises(FileNotFoundError):
        sides.driver.commit(second, manifest_of([]), ["old"])
    sides.driver.discard(DRAFT)
    sides.worker.put(DRAFT, files_of(a=b"late"))
    commit(sides, second, files_of(a=b"1"))
    assert content(sides.worker, NAME, ["a"]) == {"a": b"1"}
    with pytest.raises(FileNotFoundError):
        sides.worker.read(NAME, "old")


def test_discard(sides):
    sides.driver.discard(DRAFT)
    sides.worker.put(DRAFT, files_of(a=b"1", b=b"2"))
    for _ in range(2):
        sides.driver.discard(DRAFT)
        with pytest.raises(FileNotFoundError):
            commit(sides, DRAFT, files_of(a=b"1"))
    put_and_commit(sides, DRAFT, files_of(a=b"new"))
    sides.driver.discard(DRAFT)
    assert content(sides.worker, NAME, ["a"]) == {"a": b"new"}, "what is committed is no draft"


def test_sweep(sides):
    sides.driver.sweep()
    put_and_commit(sides, DRAFT, files_of(a=b"1"))
    for _ in range(2):
        sides.driver.sweep()
        sides.worker.sweep()
    assert content(sides.worker, NAME, ["a"]) == {"a": b"1"}
    put_and_commit(sides, Draft("checkpoint_000002", "a"), files_of(a=b"2"))
    assert content(sides.worker, "checkpoint_000002", ["a"]) == {"a": b"2"}


def test_sweep_takes_the_drafts_of_all_attempts(sides_apart):
    sides, drafts = sides_apart, [Draft(NAME, "a"), Draft(NAME, "b"), Draft("other", "b")]
    for draft in drafts:
        sides.worker.put(draft, files_of(a=b"1"))
    sides.driver.sweep()
    for draft in drafts:
        with pytest.raises(FileNotFoundError):
            content(sides.worker, draft, ["a"])


def test_delete(sides):
    sides.driver.delete(NAME)
    put_and_commit(sides, DRAFT, [MemoryFile("files/deep/a", [b"1"])])
    put_and_commit(sides, Draft("checkpoint_000002", "a"), files_of(a=b"2"))
    for _ in range(2):
        sides.driver.delete(NAME)
        assert sides.worker.names() == ["checkpoint_000002"]
    with pytest.raises(FileNotFoundError):
        sides.worker.read(NAME, MANIFEST_FILE)
    put_and_commit(sides, DRAFT, files_of(a=b"again"))
    assert content(sides.worker, NAME, ["a"]) == {"a": b"again"}


@pytest.mark.parametrize("make", [make_relayed_folder, make_relayed_memory])
def test_worker_without_sight_of_it_decides_nothing(make, tmp_path, asking):
    sides = make(tmp_path, asking)
    files = files_of(a=b"1")
    put_and_commit(sides, DRAFT, files)
    second = Draft("checkpoint_000002", "a")
    sides.worker.put(second, files)
    with pytest.raises(PermissionError):
        sides.worker.commit(second, manifest_of(files), ["a"])
    with pytest.raises(PermissionError):
        sides.worker.discard(second)
    with pytest.raises(PermissionError):
        sides.worker.delete(NAME)
    sides.worker.sweep()
    assert listed(sides) == [1]
    commit(sides, second, files)


def test_room_is_a_number_or_unknown(sides):
    sides.worker.put(DRAFT, files_of(a=b"1"))
    free_bytes = sides.worker.free_bytes()
    assert free_bytes is None or free_bytes > 0
