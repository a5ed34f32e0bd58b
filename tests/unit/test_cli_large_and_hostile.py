"""Run folders and storage that are huge, deep, looping, replaced meanwhile, or forged: verbs end, and do no harm."""

import errno
import json
import os
import shutil
import sqlite3
import time

import pytest
from typer.testing import CliRunner

from paceline.cli.app import build
from paceline.folder_removal import remove_folder
from paceline.runs import RunFolder
from paceline.runs.index import find_runs
from paceline.runs.index_file import index_path


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_RESULTS", str(tmp_path / "results"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "results" / "digits")
    yield tmp_path / "results"
    remove_folder(tmp_path / "results")


def make(logdir, **request):
    with RunFolder.create(logdir) as folder:
        folder.write_request({"config": {"lr": 0.1}, "num_workers": 2, **request})
        folder.set_state("RUNNING")
        for step in range(1, 4):
            folder.record_step(step, 0, [{"loss": 1 / step}])
        folder.record_event("note", text="hello")
        folder.set_state("SUCCEEDED")
    return folder.path


def call(*words, code=0, **options):
    result = CliRunner().invoke(build(), [*map(str, words)], **options)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, f"{result.stdout}\n{result.stderr}"
    assert not {*result.output} & {"\x1b", "\x07", "\x9b"}
    return result


# --- large -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "logs/rank_0.log", "code.diff", "environment.json"])
def test_line_of_a_terabyte(root, name):
    """Of zeros that take no room on the disk. Memory for it, nobody has."""
    run_dir = root / "digits" / "run_001"
    (run_dir / "logs").mkdir(exist_ok=True)
    with (run_dir / name).open("ab") as file:
        file.truncate(2**40)
    call("xp", "ls")
    call("xp", "ls", "--json")
    assert "SUCCEEDED" in call("xp", "show").stdout
    call("xp", "show", "--json")
    call("xp", "logs", "--tail", 3, "--grep", "nothing")
    call("xp", "rm", "digits")
    call("xp", "gc", "--yes")
    assert not (root / "digits" / "run_001").exists()


@pytest.mark.parametrize("name", ["run.json", "status.json", "tags.json"])
def test_document_of_a_gigabyte(root, name):
    with (root / "digits" / "run_001" / name).open("ab") as file:
        file.truncate(2**30)
    assert "digits" in call("xp", "ls").stdout
    call("xp", "show")
    call("xp", "rm", "digits")
    call("xp", "gc", "--yes")


def test_more_folders_than_anybody_looks_into(root):
    for number in range(20):
        (root / f"empty_{number}").mkdir()
    told = []
    assert len(find_runs(root, tell=told.append, most_folders=23)) == 1
    assert told == []
    find_runs(root, tell=told.append, most_folders=10)
    assert "has more than 10 folders that are no runs" in told[0]


def test_long_config_is_not_cut_without_a_word(root):
    make(root / "long", config={f"key_{number}": number for number in range(90)})
    assert "… 30 more: --json has all of them" in call("xp", "show", "long").stdout
    assert len(json.loads(call("xp", "show", "long", "--json").stdout)["config"]) == 90


# --- deep ------------------------------------------------------------------------------------------------------------


def make_deep(path, depth=1_050):
    """Deeper than Python's stack."""
    path.mkdir()
    fd = os.open(path, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=fd)
        inner = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(fd)


def test_run_folder_without_end(root):
    make_deep(root / "digits" / "run_001" / "deep")
    call("xp", "ls")
    call("xp", "show", "digits")
    call("xp", "export", "digits", "-o", "x.tar")
    call("xp", "rm", "digits")
    call("xp", "gc", "--yes")
    assert os.listdir(root / ".trash") == []


def test_storage_without_end(root):
    make_deep(root / "deep")
    assert "could not be read" in call("data", "show", "--root", root).stderr
    call("data", "rm", "deep", "--root", root, "--yes")
    assert not (root / "deep").exists()


# --- replaced, torn, gone --------------------------------------------------------------------------------------------


def test_index_in_whose_place_something_else_is(root):
    for make_other in (os.mkdir, os.mkfifo):
        path = index_path(root)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        make_other(path)
        for _ in range(2):
            assert "digits" in call("xp", "ls").stdout
        path.rmdir() if path.is_dir() else path.unlink()
    call("xp", "ls")
    db = sqlite3.connect(index_path(root))
    db.execute("UPDATE summaries SET content = ?", (b"[1, 2",))
    db.commit()
    db.close()
    assert "loss 0.3333" in call("xp", "ls").stdout


@pytest.mark.parametrize("name", ["run.json", "status.json", "metrics.jsonl", "events.jsonl", "tags.json", "logs"])
def test_pipe_in_the_place_of_a_file(root, name):
    path = root / "digits" / "run_001" / name
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    os.mkfifo(path)
    for words in (["ls"], ["ls", "--json"], ["show"], ["logs"], ["wait"], ["tag", "digits"], ["best", "-m", "loss"]):
        result = CliRunner().invoke(build("xp"), ["xp", *words])
        assert isinstance(result.exception, SystemExit | None), result.exception
        assert result.exit_code in (0, 1, 2, 3), f"{words}: it ends, and says what is not there"
    call("xp", "rm", "digits")
    call("xp", "gc", "--yes")


def test_trash_that_was_left_half_way(root):
    """By a removal, and by a deletion, that were killed. What is young may still go on."""
    call("xp", "rm", "digits")
    trash = root / ".trash"
    [place] = trash.iterdir()
    (place / "run").rename(place / "deleting")
    (trash / "made").mkdir()
    (trash / "young").mkdir()
    for old in (place, trash / "made"):
        os.utime(old, (1.0, 1.0))
    assert json.loads(call("xp", "restore", "--json").stdout) == []
    call("xp", "gc", "--yes")
    assert os.listdir(trash) == ["young"]


def test_two_remove_the_same(root, monkeypatch):
    from paceline.runs import trash

    make(root / "digits")
    real = os.rename

    def rename(source, target):
        """Somebody else is quicker."""
        if str(source).endswith("run_002"):
            shutil.rmtree(source)
        return real(source, target)

    monkeypatch.setattr(trash.os, "rename", rename)
    assert "digits/run_002 is no longer there" in call("xp", "rm", "digits", 2, code=3).stderr
    assert os.listdir(root / ".trash") == []
    call("xp", "rm", "digits", 1)
    [removed] = trash.removed_runs(root)
    assert trash.empty(removed)
    assert not trash.empty(removed)


def test_full_disk_on_which_not_even_the_trash_has_room(root, monkeypatch):
    from paceline.runs import trash

    def write_atomic(path, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(trash, "write_atomic", write_atomic)
    told = call("xp", "rm", "digits", code=2).stderr
    assert "`paceline xp gc`" in told
    assert f"`rm -r {root / 'digits' / 'run_001'}`" in told
    assert os.listdir(root / ".trash") == []
    assert json.loads(call("xp", "ls", "--json").stdout)[0]["name"] == "digits/run_001"


def test_results_that_cannot_be_written(root, monkeypatch):
    call("xp", "rm", "digits")
    (root / "digits").rmdir()
    (root / "digits").write_text("in the way")
    assert "cannot be done" in call("xp", "restore", "digits", code=2).stderr


def test_checkpoints_at_another_place_stay_and_are_told(root):
    make(root / "far", checkpoint_strategy={"storage_path": "s3://bucket"}, checkpoint_root="s3://bucket/far/run_001")
    told = "The checkpoints of far/run_001 are at s3://bucket/far/run_001, and stay there."
    assert told in call("xp", "rm", "far").stderr
    assert told in call("xp", "gc", "--yes").stderr
    assert "checkpoints" not in call("xp", "rm", "digits").stderr


def test_log_that_is_cut_or_replaced_while_it_is_read(root):
    from paceline.cli.xp_logs import _Tail
    from paceline.runs import load_run

    run = load_run(root / "digits")
    path = run.path / "logs" / "rank_0.log"
    path.parent.mkdir(exist_ok=True)
    tail = _Tail(run, 0, None)

    def lines():
        return list(tail.lines(is_last=False, raw=False))

    assert lines() == []
    path.write_text("one\ntwo\nto")
    assert lines() == ["one", "two"]
    with path.open("a") as file:
        file.write("rn\n")
    assert lines() == ["torn"]
    path.write_text("new\n")  # cut, and shorter
    assert lines() == ["new"]
    (path.parent / "other").write_text("rotated, and longer than before\n")
    os.replace(path.parent / "other", path)
    assert lines() == ["rotated, and longer than before"]


def test_tail_counts_lines_as_they_are_shown(root):
    path = root / "digits" / "run_001" / "logs" / "rank_0.log"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"first\n1%\r2%\r3%\r4%\nlast\n")
    assert call("xp", "logs", "--tail", 2).stdout == "4%\nlast\n"
    assert call("xp", "logs", "--tail", 3).stdout == "first\n4%\nlast\n"


def test_export_of_a_run_that_replaces_its_files(root, monkeypatch):
    from paceline.cli import exporting

    real = exporting.walk

    def walk(path):
        for folder, folders, names in real(path):
            yield folder, folders, [*names, ".status.json.1-2.tmp"]

    monkeypatch.setattr(exporting, "walk", walk)
    assert "left out" not in call("xp", "export", "-o", "x.tar.gz").stderr


@pytest.mark.parametrize("words", [["export", "-o", "x.tar"], ["export", "-o", "x.csv"], ["rm"]])
def test_run_that_is_removed_meanwhile(root, monkeypatch, words):
    """By another, after it was found: nobody takes an empty file for a copy of it."""
    from paceline.runs import index

    def find_runs(*args, **named):
        found = real(*args, **named)
        shutil.rmtree(root / "digits/run_001")
        return found

    real = index.find_runs
    monkeypatch.setattr(index, "find_runs", find_runs)
    assert "no longer there" in call("xp", words[0], "digits", *words[1:], code=3).stderr
    assert sorted(os.listdir(root.parent)) == ["cache", "results"]


# --- forged ----------------------------------------------------------------------------------------------------------


def test_run_folder_by_its_path(root):
    inner = make(root / "sweep" / "lr")
    assert call("xp", "tag", inner).stdout == "sweep/lr/run_001: no tags\n"
    call("xp", "rm", inner)
    assert not inner.exists()


@pytest.mark.parametrize("value", [{}, "x", None, True, -1, 2**63, 1e308, [[[]]]], ids=repr)
def test_forged_values(root, value):
    """Every field of every file is something else."""
    keys = [
        "config",
        "num_workers",
        "function",
        "checkpoint_strategy",
        "checkpoint_root",
        "state",
        "created",
        "started",
    ]
    keys += ["ended", "pid", "host", "machine", "worker_pids", "heartbeat", "progress", "reason", "tags", "step"]
    keys += ["attempt", "ranks", "kind", "time", "rank", "parts_s", "steps", "cpu_percent"]
    forged = json.dumps(dict.fromkeys(keys, value)) + "\n"
    for name in ("run.json", "status.json", "metrics.jsonl", "events.jsonl", "tags.json"):
        shutil.copytree(root / "digits", root / name)
        (root / name / "run_001" / name).write_text(forged)
        call("xp", "show", name)
        call("xp", "show", name, "--json")
    assert len(json.loads(call("xp", "ls", "--json").stdout)) == 6
    call("xp", "ls", "--sort", "metrics.loss")
    call("xp", "compare", "*")


# --- watching, asking ------------------------------------------------------------------------------------------------


def test_watch_in_a_pipe_has_no_control_characters(root, monkeypatch):
    rounds = iter([None])

    def sleep(seconds):
        if next(rounds, "over") == "over":
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)
    assert call("xp", "ls", "--watch", code=130).stdout.count("digits") == 2


def test_completion_knows_the_runs_of_a_name(root):
    from paceline.cli.asking import complete_words

    make(root / "digits")

    class Context:
        params = {"words": ["digits"]}  # noqa: RUF012

    assert complete_words(Context, "") == ["latest", "run_002", "run_001"]
    assert complete_words(Context, "run_001") == ["run_001"]
    Context.params = {"words": ["digits", "1"]}
    assert complete_words(Context, "") == []
    Context.params = {"words": []}
    assert complete_words(Context, "dig") == ["digits", "digits/run_002", "digits/run_001"]
