"""The index finds what reading all folders finds, whatever happened to them or to itself."""

import json
import os
import random
import shutil
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from paceline.runs import RunFolder, list_runs
from paceline.runs.index import find_runs, mark_of
from paceline.runs.index_file import IndexFile, Known, index_path


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


def make(logdir, state="SUCCEEDED"):
    with RunFolder.create(logdir) as folder:
        if state != "PENDING":
            folder.set_state("RUNNING")
        if state not in ("PENDING", "RUNNING"):
            folder.set_state(state)
    return folder.path


def later():
    """A clock for which all files have settled."""
    return time.time() + 3


def seen(root, clock=later):
    return [(run.path, run.state) for run in find_runs(root, clock=clock)]


def there(root):
    return [(str(run.path), run.status.state) for run in list_runs(root, clock=later)]


def kept(root):
    """What the index itself has, of runs."""
    return IndexFile(root).load().runs


def test_finds_what_is_there_and_reads_it_once(root):
    make(root / "a")
    make(root / "a", "FAILED")
    make(root / "group" / "b")
    assert seen(root) == there(root)
    assert set(kept(root)) == {"a/run_001", "a/run_002", "group/b/run_001"}
    # The file can no longer be read: who answers from the index has not tried.
    status = root / "a" / "run_002" / "status.json"
    before, content = os.stat(status), status.read_bytes()
    known = IndexFile(root).load()
    status.write_bytes(content.replace(b"FAILED", b"GARBLE"))
    os.utime(status, ns=(before.st_atime_ns, before.st_mtime_ns))
    forged = {"a/run_002": (mark_of(os.lstat(status)), *known.runs["a/run_002"][1:])}
    IndexFile(root).save(Known(runs=forged), Known())
    assert ("FAILED") in [state for _, state in seen(root)]


def test_a_change_shows_also_if_mtime_and_size_are_set_back(root):
    status = make(root / "a", "STOPPED") / "status.json"
    assert [state for _, state in seen(root)] == ["STOPPED"]
    before = os.stat(status)
    status.write_bytes(status.read_bytes().replace(b'"STOPPED"', b'"FAILED" '))
    os.utime(status, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert [state for _, state in seen(root)] == ["FAILED"]


def test_what_is_new_within_the_tick_of_a_clock_is_not_kept(root):
    make(root / "a")
    seen(root, clock=time.time)
    assert kept(root) == {}
    seen(root)
    assert set(kept(root)) == {"a/run_001"}


def test_folder_that_is_copied_in_appears_and_one_that_is_removed_goes(root, tmp_path):
    make(root / "a")
    other = make(tmp_path / "elsewhere" / "b", "FAILED")
    assert len(seen(root)) == 1
    shutil.copytree(other.parent, root / "deep" / "down" / "b")  # times and all, as rsync -a does
    shutil.copytree(other, root / "a" / "run_009")
    assert seen(root) == there(root)
    assert len(seen(root)) == 3
    shutil.rmtree(root / "a" / "run_001")
    shutil.rmtree(root / "deep")
    assert [path for path, _ in seen(root)] == [str(root / "a" / "run_009")]
    assert set(kept(root)) == {"a/run_009"}


def test_renamed_run_folder_is_found_by_what_is_in_it(root):
    make(root / "a").rename(root / "best")
    assert seen(root) == there(root) == [(str(root / "best"), "SUCCEEDED")]
    assert seen(root / "best") == there(root / "best")


def test_live_run_is_never_stale(root):
    with RunFolder.create(root / "a") as folder:
        assert seen(root) == there(root) == [(str(folder.path), "PENDING")]
        folder.set_state("RUNNING")
        assert [state for _, state in seen(root)] == ["RUNNING"]
        assert kept(root) == {}
        folder.set_state("FAILED", "why not")
    assert [state for _, state in seen(root)] == ["FAILED"]
    with RunFolder.reopen(folder.path) as folder:  # resumed
        folder.set_state("RUNNING")
        assert [state for _, state in seen(root)] == ["RUNNING"]


def test_run_whose_driver_is_gone_is_lost(root):
    path = make(root / "a", "RUNNING") / "status.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps({**fields, "pid_started": 1}))
    assert [state for _, state in seen(root)] == ["LOST"]
    assert kept(root) == {}


def test_deleting_the_index_loses_nothing(root):
    make(root / "a")
    before = seen(root)
    index_path(root).unlink()
    assert seen(root) == before


def damage_header(path):
    path.write_bytes(b"this is no database" * 100)


def damage_pages(path):
    data = bytearray(path.read_bytes())
    data[200:] = os.urandom(len(data) - 200)
    path.write_bytes(data)


def damage_empty(path):
    path.write_bytes(b"")


def damage_text(path):
    """What SQLite says of it is no UTF-8 either."""
    path.write_bytes(path.read_bytes().replace(b"CREATE TABLE runs", b"CREATE TABL\xa2 runs"))


@pytest.mark.parametrize("damage", [damage_header, damage_pages, damage_empty, damage_text])
def test_damaged_index_is_made_anew(root, damage):
    make(root / "a")
    before = seen(root)
    damage(index_path(root))
    assert seen(root) == before
    seen(root)
    assert set(kept(root)) == {"a/run_001"}


def test_index_of_somebody_else_is_left_alone(root):
    make(root / "a")
    index_path(root).parent.mkdir(parents=True)
    with sqlite3.connect(index_path(root)) as db:
        db.execute("CREATE TABLE theirs (x)")
    db.close()
    before = index_path(root).read_bytes()
    assert seen(root) == there(root)
    assert index_path(root).read_bytes() == before


def test_index_of_another_root_is_not_believed(root, tmp_path):
    make(root / "a")
    make(tmp_path / "other" / "b", "FAILED")
    assert seen(tmp_path / "other")
    shutil.copy(index_path(tmp_path / "other"), index_path(root))
    assert seen(root) == there(root)


@pytest.mark.parametrize("name", ["..", "a//b", "../../etc", ".hidden", "a/.b", "a/", "/a", "a\0b"])
def test_index_that_names_other_places_is_damaged(root, name):
    make(root / "a")
    seen(root)
    with sqlite3.connect(index_path(root)) as db:
        db.execute("UPDATE folders SET names = ? WHERE path = ''", (name,))
    db.close()
    assert seen(root) == there(root)


def test_link_in_the_place_of_the_index_is_not_followed(root, tmp_path):
    make(root / "a")
    index_path(root).parent.mkdir(parents=True)
    index_path(root).symlink_to(tmp_path / "precious")
    assert seen(root) == there(root)
    assert not (tmp_path / "precious").exists()


def test_locked_and_unwritable_index(root):
    make(root / "a")
    before = seen(root)
    make(root / "b")
    db = sqlite3.connect(index_path(root), isolation_level=None)
    db.execute("BEGIN EXCLUSIVE")
    assert seen(root) == there(root) != before
    db.close()
    index_path(root).parent.chmod(0o500)
    index_path(root).chmod(0o400)
    try:
        assert seen(root) == there(root)
    finally:
        index_path(root).parent.chmod(0o700)


def test_cache_folder_that_cannot_be_made(root, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    make(root / "a")
    assert seen(root) == there(root)


def test_links_and_pipes_in_the_place_of_folders_and_files(root, tmp_path):
    outside = make(tmp_path / "outside" / "x")
    (root / "link").symlink_to(outside.parent)
    (root / "a").mkdir()
    (root / "a" / "run_001").symlink_to(outside)
    run = make(root / "b")
    (run / "status.json").unlink()
    (run / "status.json").symlink_to(outside / "status.json")
    pipe = make(root / "c")
    (pipe / "status.json").unlink()
    os.mkfifo(pipe / "status.json")
    assert seen(root) == there(root)
    assert {state for _, state in seen(root)} == {"LOST"}


def test_names_that_are_not_utf8(root):
    path = os.path.join(os.fsencode(root), b"caf\xe9")
    make(os.fsdecode(path))
    for _ in range(2):
        assert [run.name for run in find_runs(root, clock=later)] == ["caf\udce9/run_001"]


def test_several_at_once(root):
    for number in range(20):
        make(root / f"exp_{number}")
    expected = sorted(path for path, _ in there(root))
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: sorted(path for path, _ in seen(root)), range(24)))
    assert all(answer == expected for answer in answers)


@pytest.mark.parametrize("seed", range(5))
def test_whatever_is_done_to_folders(root, seed):
    """Runs come, end, move and go in a random order; after each, both ways see the same."""
    draw = random.Random(seed)
    for _ in range(40):
        runs = [run.path for run in list_runs(root)]
        one = draw.choice(runs) if runs else None
        match draw.randrange(7):
            case 0 | 1 | 2:
                logdir = draw.choice(["a", "b", "g/c", "g/d"])
                make(root / logdir, draw.choice(["SUCCEEDED", "FAILED", "RUNNING", "PENDING"]))
            case 3 if one:
                shutil.rmtree(one)
            case 4 if one:
                one.rename(one.parent / f"moved_{draw.randrange(10**6)}")
            case 5 if one:
                (one / "status.json").unlink(missing_ok=True)
            case 6 if one and (one / "status.json").exists():
                RunFolder.reopen(one).close()
        assert sorted(seen(root)) == sorted(there(root))
