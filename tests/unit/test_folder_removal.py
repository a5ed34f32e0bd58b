"""A folder goes with all that is in it, and nothing else does."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from paceline.folder_removal import remove_folder
from paceline.regular_files import walk


def make_deep(path, depth, name):
    """A path so long has no name: each folder is made from within the one above."""
    path.mkdir()
    fd = os.open(path, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir(name, dir_fd=fd)
        inner = os.open(name, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
    os.close(fd)


def test_deeper_than_the_stack_and_longer_than_a_path(tmp_path):
    make_deep(tmp_path / "deep", 1_050, "deeper")
    remove_folder(tmp_path / "deep")
    assert os.listdir(tmp_path) == []


def test_of_links_and_pipes_only_these(tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "precious").write_text("mine")
    folder = tmp_path / "folder"
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "link").symlink_to(tmp_path / "outside")
    (folder / "a" / "b" / "nowhere").symlink_to("/nothing")
    os.mkfifo(folder / "pipe")
    remove_folder(folder)
    assert (tmp_path / "outside" / "precious").read_text() == "mine"
    assert os.listdir(tmp_path) == ["outside"]
    remove_folder(folder)  # it is gone already
    (tmp_path / "link").symlink_to(tmp_path / "outside")
    with pytest.raises(OSError, match=r"Not a directory|symbolic"):
        remove_folder(tmp_path / "link")


def test_several_at_once(tmp_path):
    for number in range(300):
        (tmp_path / "x" / str(number % 7) / str(number)).mkdir(parents=True)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: remove_folder(tmp_path / "x"), range(4)))
    assert not (tmp_path / "x").exists()


def test_walk(tmp_path):
    make_deep(tmp_path / "deep", 1_050, "d")
    (tmp_path / "deep" / "up").symlink_to(tmp_path)
    found = list(walk(tmp_path / "deep"))
    assert len(found) > 1_000
    assert (sorted(found[0][1]), found[0][2]) == (["d", "up"], [])
    assert (found[-1][1:]) in (([], ["file"]), ([], []))
    remove_folder(tmp_path / "deep")
