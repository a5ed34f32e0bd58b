"""One suite for every kind of storage: a set of files is there as a whole, or not at all."""

import errno
import os
from pathlib import Path

import pytest

from paceline.checkpoints.content.files import DiskFile, MemoryFile
from paceline.checkpoints.storage import open_storage, split_path
from paceline.checkpoints.storage.fsspec import FsspecStorage
from paceline.checkpoints.storage.local import LocalStorage
from paceline.checkpoints.storage.relay import StorageRelay
from paceline.checkpoints.storage.relayed import RelayedStorage
from paceline.checkpoints.storage.workspace import Workspace, sweep
from paceline.errors import ArgumentError

MANIFEST = MemoryFile("checkpoint.json", [b"{}"])


class BrokenFile:
    """Yields some content, then fails as a full disk does."""

    name = "broken.bin"

    def chunks(self):
        yield memoryview(b"some")
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture(params=["local", "fsspec", "relayed"])
def storage(request, tmp_path, asking):
    if request.param == "local":
        return LocalStorage(tmp_path / "root")
    if request.param == "relayed":
        root = str(tmp_path / "root")
        relay = StorageRelay(root, None)
        relay.begin()
        return RelayedStorage(root, asking(relay))
    return FsspecStorage(f"memory://{tmp_path.name}/root")


def content(storage, name, files):
    fetched = storage.fetch(name, files)
    try:
        return {file: (fetched.path / file).read_bytes() for file in files}
    finally:
        fetched.discard()


def test_what_is_written_can_be_read(storage):
    storage.write("one", [MemoryFile("a.bin", [b"12", memoryview(b"34")]), MemoryFile("files/x/b", [b"5"]), MANIFEST])
    assert storage.names() == ["one"]
    assert storage.read("one", "a.bin") == b"1234"
    assert content(storage, "one", ["a.bin", "files/x/b"]) == {"a.bin": b"1234", "files/x/b": b"5"}
    assert storage.path_of("one") == f"{storage.root}/one"


def test_missing_things(storage):
    assert storage.names() == []
    with pytest.raises(FileNotFoundError):
        storage.read("one", "checkpoint.json")
    storage.delete("one")


def test_content_larger_than_a_chunk(storage):
    big = os.urandom(9 * 2**20 + 3)
    storage.write("one", [MemoryFile("big", [big]), MANIFEST])
    assert content(storage, "one", ["big"]) == {"big": big}


def test_a_taken_name_is_left_alone(storage):
    storage.write("one", [MemoryFile("a", [b"old"]), MANIFEST])
    with pytest.raises(FileExistsError):
        storage.write("one", [MemoryFile("a", [b"new"]), MANIFEST])
    assert storage.read("one", "a") == b"old"


def test_disk_full_while_writing_leaves_nothing(storage):
    storage.write("one", [MemoryFile("a", [b"1"]), MANIFEST])
    with pytest.raises(OSError, match="No space left"):
        storage.write("two", [MemoryFile("a", [b"2"]), BrokenFile(), MANIFEST])
    for file in ("a", "broken.bin", "checkpoint.json"):
        with pytest.raises(FileNotFoundError):
            storage.read("two", file)
    assert storage.read("one", "a") == b"1"
    storage.write("two", [MemoryFile("a", [b"2"]), MANIFEST])
    assert storage.read("two", "a") == b"2"


def test_delete(storage):
    for name in ("one", "two"):
        storage.write(name, [MemoryFile("files/deep/a", [b"1"]), MANIFEST])
    storage.delete("one")
    assert storage.names() == ["two"]
    with pytest.raises(FileNotFoundError):
        storage.read("one", "checkpoint.json")


def test_files_from_a_workspace(storage):
    with storage.workspace() as workspace:
        (workspace.path / "x").write_bytes(b"from disk")
        storage.write("one", [DiskFile("files/x", workspace.path / "x"), MANIFEST])
    assert storage.read("one", "files/x") == b"from disk"
    assert not workspace.path.exists()


def test_local_storage_leaves_nothing_but_the_files(tmp_path):
    storage = LocalStorage(tmp_path)
    storage.write("one", [MemoryFile("a", [b"1"]), MANIFEST])
    storage.write("two", [MemoryFile("a", [b"1"]), MANIFEST])
    storage.delete("one")
    assert os.listdir(tmp_path) == ["two"]
    assert sorted(os.listdir(tmp_path / "two")) == ["a", "checkpoint.json"]


def test_torn_local_folder_is_not_replaced(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "precious").touch()
    with pytest.raises(FileExistsError):
        LocalStorage(tmp_path).write("one", [MANIFEST])
    assert os.listdir(tmp_path / "one") == ["precious"]
    assert os.listdir(tmp_path) == ["one"]


def test_sweep_takes_the_dead_and_spares_the_living(tmp_path):
    dead = tmp_path / ".paceline-staging-dead"
    dead.mkdir()
    (dead / "half.bin").write_bytes(b"x")
    other = tmp_path / ".someone-elses"
    other.mkdir()
    link = tmp_path / ".paceline-staging-link"
    link.symlink_to(other)
    with Workspace(tmp_path) as living:
        sweep(tmp_path)
        assert not dead.exists()
        assert living.path.exists()
        assert other.exists()
        assert link.is_symlink()
    assert not living.path.exists()


def test_next_writer_clears_what_a_dead_one_left(tmp_path):
    (tmp_path / ".paceline-staging-dead" / "one").mkdir(parents=True)
    LocalStorage(tmp_path).write("one", [MANIFEST])
    assert os.listdir(tmp_path) == ["one"]


@pytest.mark.parametrize(
    ("given", "root"),
    [
        ("/a/b", "/a/b"),
        ("file:///a/b", "/a/b"),
        ("file:///a%20b", "/a b"),
        ("local:///a", "/a"),
        ("~/x", str(Path.home() / "x")),
        ("rel/x", str(Path.cwd() / "rel/x")),
        (Path("rel"), str(Path.cwd() / "rel")),
    ],
)
def test_local_roots(given, root):
    storage = open_storage(given)
    assert isinstance(storage, LocalStorage)
    assert storage.root == root


@pytest.mark.parametrize("url", ["s3://bucket/x", "gs://b", "memory://x", "simplecache::s3://bucket/x"])
def test_urls_go_to_fsspec(url):
    assert isinstance(open_storage(url), FsspecStorage)
    assert open_storage(url + "/").root == url


def test_unknown_protocol():
    with pytest.raises(ArgumentError, match="s3://bucket/folder"):
        open_storage("nosuch://x/y").names()


def test_missing_file_system_package_names_itself():
    # a package that fsspec knows, and that our test environment does not have
    with pytest.raises(ImportError, match=r"pip install gcsfs"):
        open_storage("gs://bucket/x").names()


def test_split_path():
    assert split_path("/a/b/c/") == ("/a/b", "c")
    assert split_path("s3://bucket/x/c") == ("s3://bucket/x", "c")
    assert split_path("rel") == (str(Path.cwd()), "rel")
