"""`paceline data` in process: storage is shown, and nothing outside of it is ever removed."""

import json
import os
import zlib

import pytest
from typer.testing import CliRunner

from paceline.cli.app import build


@pytest.fixture
def root(tmp_path, monkeypatch):
    root = tmp_path / "storage"
    (root / "images" / "train").mkdir(parents=True)
    (root / "images" / "train" / "a.bin").write_bytes(bytes(3000))
    (root / "images" / "b.bin").write_bytes(bytes(10))
    (root / "old").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "precious").write_text("mine")
    (root / "out").symlink_to(tmp_path / "outside")
    (root / "old" / "up").symlink_to(tmp_path / "outside")
    os.mkfifo(root / "pipe")
    monkeypatch.setenv("PACELINE_STORAGE", str(root))
    return root


def data(*words, code=0, **options):
    result = CliRunner().invoke(build("data"), ["data", *map(str, words)], **options)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def test_show(root):
    lines = data("show").stdout.splitlines()
    assert lines[0].split()[:2] == ["3.0", "KB"]
    assert lines[1].split() == ["3.0", "KB", "├─", "images/", "2", "files"]
    assert lines[2].split() == ["3.0", "KB", "│", "├─", "train/", "1", "file"]
    assert "out (link)" in "\n".join(lines)
    tree = json.loads(data("show", "images", "--depth", "1", "--json").stdout)
    assert (tree["num_bytes"], tree["num_files"]) == (3010, 2)
    assert [entry["name"] for entry in tree["entries"]] == ["train", "b.bin"]


def test_names_of_files_do_nothing_to_a_terminal(root):
    (root / "\x1b[2Jevil\x9b").mkdir()
    assert not {"\x1b", "\x9b"} & {*data("show").output}
    assert not {"\x1b", "\x9b"} & {*data("show", "--json").output}


def test_rm(root):
    assert "Nobody is there to answer" in data("rm", "images", code=2).stderr
    assert (root / "images").exists()
    data("rm", "images/train", "--yes")
    assert not (root / "images" / "train").exists()
    data("rm", "images/b.bin", "--yes")
    assert os.listdir(root / "images") == []


@pytest.mark.parametrize(
    ("path", "code", "told"),
    [
        ("../outside", 2, "leads out of the storage"),
        ("images/../../outside", 2, "leads out of the storage"),
        ("/etc", 2, "is an absolute path: expected one below the root"),
        ("out/precious", 2, "is a link"),
        ("old/up/precious", 2, "is a link"),
        (".", 2, "is the storage itself"),
        ("", 2, "is the storage itself"),
        ("nothing", 3, "There is no nothing"),
        ("nothing/at/all", 3, "There is no nothing"),
        ("images/b.bin/x", 2, "no folder"),
    ],
)
def test_rm_refuses(root, path, code, told, tmp_path):
    assert told in data("rm", path, "--yes", code=code).stderr
    assert (tmp_path / "outside" / "precious").read_text() == "mine"
    assert (root / "images" / "train" / "a.bin").exists()


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("images/train", "images/train (3.0 KB, 1 file) for good?"),
        ("images/b.bin", "images/b.bin (10 B) for good?"),
        ("out", "out (a link; what it leads to stays) for good?"),
    ],
)
def test_rm_asks_about_what_there_is(root, path, told):
    assert told in data("rm", path, code=2).stderr


@pytest.mark.parametrize("path", [".", "", "/etc"])
def test_rm_does_not_ask_whether_to_do_what_it_refuses(root, path):
    assert "for good?" not in data("rm", path, code=2).stderr


@pytest.mark.parametrize("path", ["out", "old/up", "old"])
def test_of_a_link_only_the_link_goes(root, path, tmp_path):
    data("rm", path, "--yes")
    assert not os.path.lexists(root / path)
    assert (tmp_path / "outside" / "precious").read_text() == "mine"


def test_storage_has_to_be_named(tmp_path, monkeypatch):
    monkeypatch.delenv("PACELINE_STORAGE", raising=False)
    assert "Which storage?" in data("show", code=2).stderr
    assert "is no folder" in data("show", "--root", tmp_path / "none", code=2).stderr


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache with three prepared datasets, of which one was used long ago and one is in use."""
    from paceline.data.prepared_cache import ROWS, Draft

    monkeypatch.setenv("PACELINE_STORAGE", str(tmp_path))
    holds = []
    for number, name in enumerate(("old", "used", "new")):
        draft = Draft(tmp_path / ".prepared")
        (draft.path / ROWS).write_bytes(bytes(1000))
        told = {"num_rows": number, "num_bytes": 1000, "crc32": zlib.crc32(bytes(1000)), "source": f"src.data.{name}"}
        holds.append(draft.commit(str(number) * 32, told))
    for number in (0, 2):
        holds[number].release()
    os.utime(tmp_path / ".prepared" / ("0" * 32) / "lock", (0, 0))
    yield tmp_path / ".prepared"
    holds[1].release()


def names(cache):
    return {name[0] for name in os.listdir(cache)}


def test_gc_removes_what_is_old(cache):
    assert "Nobody is there to answer" in data("gc", code=2).stderr
    shown = data("gc", "--dry-run")
    assert "age" in shown.stdout
    assert "src.data.old" in shown.stdout
    assert "1 of 3 datasets" in shown.stderr
    assert names(cache) == {"0", "1", "2"}
    told = json.loads(data("gc", "--yes", "--json").stdout)
    assert [(one["source"], one["why"]) for one in told["removed"]] == [("src.data.old", "age")]
    assert {one["source"]: one["why"] for one in told["kept"]} == {"src.data.used": "in use", "src.data.new": None}
    assert names(cache) == {"1", "2"}


def test_gc_removes_what_is_too_much_and_not_what_is_in_use(cache):
    data("gc", "--max-size", "0", "--yes")
    assert names(cache) == {"1"}
    assert json.loads(data("gc", "--max-size", "0", "--yes", "--json").stdout)["removed"] == []


def test_gc_refuses_what_is_no_size_or_time(cache):
    assert "expected a number and a unit, as in 500M" in data("gc", "--max-size", "much", code=2).stderr
    assert "is no length of time" in data("gc", "--older-than", "long", code=2).stderr
    assert "expected a number and a unit" in data("gc", "--max-size", "10", "--yes", code=2).stderr
    assert "'7' has no unit" in data("gc", "--older-than", "7", "--yes", code=2).stderr
    assert names(cache) == {"0", "1", "2"}


def test_gc_of_nothing(tmp_path):
    assert "0 of 0 datasets" in data("gc", "--root", tmp_path / "nowhere").stderr
    assert not (tmp_path / "nowhere").exists()
