"""What is particular to one kind of storage, and which kind a path or URL gets. What all of them promise is in
tests/contract/test_storages.py."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from paceline.checkpoints.content.files import DiskFile, MemoryFile
from paceline.checkpoints.storage import open_storage, split_path
from paceline.checkpoints.storage.base import Draft
from paceline.checkpoints.storage.fsspec import FsspecStorage
from paceline.checkpoints.storage.local import LocalStorage
from paceline.checkpoints.storage.memory import MemoryStorage
from paceline.checkpoints.storage.workspace import Workspace, sweep
from paceline.errors import ArgumentError

MANIFEST = MemoryFile("checkpoint.json", [b"{}"])
FILE = MemoryFile("a", [b"1"])


def write(storage, name, files=(FILE,)):
    storage.put(Draft(name, "token"), files)
    storage.commit(Draft(name, "token"), MANIFEST, [file.name for file in files])


def test_local_storage_leaves_nothing_but_the_files(tmp_path):
    storage = LocalStorage(tmp_path)
    for name in ("one", "two"):
        write(storage, name)
    storage.delete("one")
    storage.put(Draft("three", "token"), [FILE])
    storage.fetch(Draft("three", "token"), ["a"]).discard()
    storage.discard(Draft("three", "token"))
    assert os.listdir(tmp_path) == ["two"]
    assert sorted(os.listdir(tmp_path / "two")) == ["a", "checkpoint.json"]


def test_torn_local_folder_is_not_replaced(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "precious").touch()
    storage, draft = LocalStorage(tmp_path), Draft("one", "token")
    with pytest.raises(FileExistsError):
        write(storage, "one")
    assert os.listdir(tmp_path / "one") == ["precious"]
    (tmp_path / "one" / "precious").rename(tmp_path / "saved")
    storage.commit(draft, MANIFEST, ["a"])
    assert sorted(os.listdir(tmp_path / "one")) == ["a", "checkpoint.json"]
    assert sorted(os.listdir(tmp_path)) == ["one", "saved"]


def test_file_of_another_writer_survives_a_failed_put(tmp_path):
    storage, draft = LocalStorage(tmp_path), Draft("one", "token")
    storage.put(draft, [FILE])
    with pytest.raises(FileExistsError):
        storage.put(draft, [MemoryFile("mine", [b"2"]), MemoryFile("a", [b"2"])])
    storage.commit(draft, MANIFEST, ["a"])
    assert storage.read("one", "a") == b"1"
    assert sorted(os.listdir(tmp_path / "one")) == ["a", "checkpoint.json"]


class Interrupting:
    """A file during whose writing something else happens."""

    name = "b"

    def __init__(self, happens):
        self.chunks = lambda: (memoryview(data) for data in (happens() or b"2",))


def test_draft_is_dropped_while_it_is_being_written(tmp_path):
    storage, draft = LocalStorage(tmp_path), Draft("one", "token")
    for last in ("c", "ranks/0/c"):
        storage.put(draft, [FILE, Interrupting(lambda: storage.discard(draft)), MemoryFile(last, [b"3"])])
        assert os.listdir(tmp_path) == []
    with pytest.raises(FileNotFoundError):  # who asks for it all the same hears that it is not there
        storage.commit(draft, MANIFEST, ["a"])


def test_draft_of_another_rank_is_dropped_when_it_was_just_seen(tmp_path, monkeypatch):
    """It was taken for somebody else's, which ended the run."""
    storage, draft = LocalStorage(tmp_path), Draft("one", "token")
    storage.put(draft, [MemoryFile("a", [b"a"])])

    def mkdir(path, mode=0o777):
        storage.discard(draft)
        raise FileExistsError(errno.EEXIST, "File exists", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", mkdir)
        storage.put(draft, [MemoryFile("b", [b"b"])])
    assert os.listdir(tmp_path) == []


def test_root_is_deleted_while_a_draft_is_being_written(tmp_path):
    storage = LocalStorage(tmp_path / "root")
    happens = Interrupting(lambda: shutil.rmtree(tmp_path / "root"))
    with pytest.raises(FileNotFoundError):
        storage.put(Draft("one", "token"), [happens, MemoryFile("c", [b"3"])])


def test_file_from_a_workspace_is_linked_on_the_same_disk(tmp_path):
    storage, draft = LocalStorage(tmp_path), Draft("one", "token")
    with storage.workspace() as workspace:
        (workspace.path / "x").write_bytes(b"1")
        number = (workspace.path / "x").stat().st_ino
        storage.put(draft, [DiskFile("x", workspace.path / "x")])
    fetched = storage.fetch(draft, ["x"])
    assert (fetched.path / "x").stat().st_ino == number
    fetched.discard()


def test_a_put_that_fails_in_memory_leaves_nothing():
    class Broken:
        name = "b"

        def chunks(self):
            raise OSError(errno.ENOSPC, "No space left on device")
            yield

    storage = MemoryStorage("here")
    with pytest.raises(OSError, match="No space"):
        storage.put(Draft("one", "token"), [FILE, Broken()])
    assert storage._drafts == {}


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


def test_next_attempt_clears_what_a_dead_writer_left(tmp_path):
    (tmp_path / ".paceline-staging-dead" / "one").mkdir(parents=True)
    (tmp_path / ".someone-elses").mkdir()
    (tmp_path / ".foreign.draft.bak").touch()
    storage = LocalStorage(tmp_path)
    for token in ("first", "second"):
        storage.put(Draft("one", token), [FILE])
    with storage.workspace() as living:
        storage.sweep()
        assert living.path.exists()
    assert sorted(os.listdir(tmp_path)) == [".foreign.draft.bak", ".someone-elses"]


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


def test_another_process_deletes_it_first(tmp_path):
    class TooLate(LocalStorage):
        """Somebody else is faster, just after it was seen."""

        def workspace(self):
            shutil.rmtree(tmp_path / "one")
            return super().workspace()

    write(LocalStorage(tmp_path), "one")
    TooLate(tmp_path).delete("one")
    assert os.listdir(tmp_path) == []
