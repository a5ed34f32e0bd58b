"""Run folders and checkpoints that are damaged, or were made to do harm: whoever reads one gets an answer that makes
sense or an error of ours, soon, and other runs are none the worse for it."""

import errno
import itertools
import json
import os
import shutil
import signal
import zlib
from contextlib import contextmanager
from pathlib import Path

import pytest

import paceline
from paceline import BackendConfig, Trainer
from paceline.checkpoints import CheckpointStore, load, read_info, snapshot
from paceline.checkpoints.manifest import Manifest
from paceline.checkpoints.reading import load_through
from paceline.checkpoints.storage.local import LocalStorage
from paceline.errors import (
    CheckpointDamagedError,
    CheckpointError,
    PacelineError,
    RunNotFoundError,
)
from paceline.regular_files import UnreadableFileError
from paceline.runs import RunFolder, list_runs, load_call, load_run

CHECKPOINT = "checkpoints/checkpoint_000001"
STATE = {"epoch": 1, "blob": b"x" * 2000}
WHOLE = (STATE, [{"own": 1}], {"mine.txt": "mine"})
SECRET = {"state": "FAILED", "reason": "SECRET", "config": {"SECRET": 1}, "kind": "SECRET", "SECRET": "SECRET"} | {
    "step": 1, "attempt": 0, "ranks": [{"SECRET": 1}],
}  # fmt: skip


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """A logdir with one run of one rank, and a checkpoint that has everything a checkpoint can have."""

    def train():
        paceline.report(loss=0.5)
        paceline.save_checkpoint(files, per_rank={"own": 1}, **STATE)

    files = tmp_path_factory.mktemp("files")
    (files / "mine.txt").write_text("mine")
    with Trainer(BackendConfig(), num_workers=0, logdir=tmp_path_factory.mktemp("pristine")) as trainer:
        trainer.run(train)
    (trainer.latest_run_dir / "logs" / "rank_0.log").write_text("hello\n")
    return trainer.logdir


@pytest.fixture
def run_dir(pristine, tmp_path):
    """A run to be damaged, beside which there is another."""
    for name in ("run_001", "run_002"):
        shutil.copytree(pristine / "run_001", tmp_path / "runs" / name)
    return tmp_path / "runs" / "run_001"


@contextmanager
def bounded(seconds=20):
    def fail(*_):
        pytest.fail("it hangs")

    former = signal.signal(signal.SIGALRM, fail)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, former)


def content(path):
    """All of a checkpoint."""
    checkpoint = load(path)
    files = {file.name: file.read_text() for file in checkpoint.directory.iterdir()}
    return dict(checkpoint), checkpoint.all_ranks, files


def of_run(run_dir):
    """All that can be read of a run, and that it can go on as Trainer.resume does it."""
    run = load_run(run_dir)
    names = ("request", "config", "environment", "events", "seed", "status", "metrics", "checkpoints")
    yield from (lambda name=name: getattr(run, name) for name in (*names, "best_checkpoint_path"))
    yield from (run.log, lambda: str(run), lambda: repr(run))
    yield from (lambda: load_call(run_dir), lambda: RunFolder.reopen(run_dir).close())


def of_checkpoint(run_dir):
    run, path = load_run(run_dir), run_dir / CHECKPOINT
    yield from (lambda: run.checkpoints, lambda: run.latest_checkpoint_path, lambda: read_info(path))
    yield lambda: content(path) == WHOLE or pytest.fail("the checkpoint is not what was saved")


def answers(readers):
    """What each of them has to say; None where it is an error of ours."""
    for reader in readers:
        try:
            yield repr(reader())
        except PacelineError:
            yield None


def check(run_dir, readers):
    """Reads all of it, and the listing, in which the other run is as ever."""
    found = list(answers(readers(run_dir)))
    damaged, other = sorted(list_runs(run_dir.parent), key=lambda run: run.path.name)
    assert (damaged.path.name, other.status.state, len(other.checkpoints)) == ("run_001", "SUCCEEDED", 1)
    assert "SECRET" not in repr(found)
    return found


def put(data):
    return lambda path: path.write_bytes(data)


DAMAGES = {
    "gone": lambda path: None,
    "empty": put(b""),
    "zeros": put(bytes(100)),
    "null": put(b"null\n"),
    "list": put(b"[1]\n"),
    "no fields": put(b"{}\n"),
    "text": put(b"\xff\xfe text\n"),
    "infinity": put(b'{"version": Infinity, "state": Infinity, "crc32": Infinity, "step": Infinity}\n'),
    "huge number": put(b'{"version": %s, "crc32": 0, "config": %s}\n' % (b"9" * 5000, b"9" * 5000)),
    "deep": put(b"[" * 100_000),
    "sparse": lambda path: (path.touch(), os.truncate(path, 2**40)),
    "directory": lambda path: path.mkdir(),
    "pipe": os.mkfifo,
    "loop": lambda path: path.symlink_to(path),
    "device": lambda path: path.symlink_to("/dev/zero"),
    "dangling": lambda path: path.symlink_to("nowhere"),
    "root": lambda path: path.symlink_to("/"),
}


@pytest.mark.parametrize(
    ("name", "readers"),
    [
        *((name, of_run) for name in ("run.json", "status.json", "metrics.jsonl", "events.jsonl", "environment.json")),
        *((name, of_run) for name in ("call.pkl", "driver.lock", "logs", "logs/rank_0.log", "checkpoints", CHECKPOINT)),
        *((f"{CHECKPOINT}/{name}", of_checkpoint) for name in ("checkpoint.json", "state.json", "arrays.safetensors")),
        *((f"{CHECKPOINT}/{name}", of_checkpoint) for name in ("files", "files/mine.txt", "ranks/0/state.json")),
        *((name, of_checkpoint) for name in ("checkpoints", CHECKPOINT)),
    ],
)
def test_whatever_is_in_the_place_of_a_file(name, readers, run_dir):
    assert None not in check(run_dir, readers)
    path, aside = run_dir / name, run_dir.parents[1] / "aside"
    path.rename(aside)
    for way, damage in DAMAGES.items():
        damage(path)
        print(way)  # for whoever reads a failure
        with bounded():
            check(run_dir, readers)
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


@pytest.mark.parametrize(
    "name", ["run.json", "status.json", "metrics.jsonl", "events.jsonl", "environment.json", "logs/rank_0.log"]
)
def test_link_out_of_a_run_folder_is_not_followed(name, run_dir, tmp_path):
    (tmp_path / "outside").write_text(json.dumps(SECRET) + "\n")
    (run_dir / name).unlink()
    (run_dir / name).symlink_to(tmp_path / "outside")
    assert None in check(run_dir, of_run)
    if name == "status.json":
        status = load_run(run_dir).status
        assert (status.state, "leads out of its folder" in status.reason) == ("LOST", True)


@pytest.mark.parametrize("name", ["checkpoint.json", "state.json", "arrays.safetensors", "files", "files/mine.txt"])
def test_link_out_of_a_checkpoint_is_not_followed(name, run_dir, tmp_path):
    path = run_dir / CHECKPOINT / name
    path.rename(tmp_path / "outside")
    path.symlink_to(tmp_path / "outside")
    with pytest.raises(CheckpointDamagedError, match=r"(mine\.txt|json|safetensors): it is a link that leads out"):
        load(run_dir / CHECKPOINT)


def test_link_inside_a_checkpoint_is_followed(run_dir):
    (run_dir / CHECKPOINT / "state.json").rename(run_dir / CHECKPOINT / "other")
    (run_dir / CHECKPOINT / "state.json").symlink_to("other")
    (run_dir / "best").symlink_to(CHECKPOINT)  # and so is one that the reader names
    assert dict(load(run_dir / "best")) == STATE


def test_checkpoints_behind_a_link_out_of_the_folder_are_not_listed(run_dir, tmp_path):
    (run_dir / CHECKPOINT).rename(tmp_path / "elsewhere")
    (run_dir / CHECKPOINT).symlink_to(tmp_path / "elsewhere")
    assert load_run(run_dir).checkpoints == []
    (run_dir / "checkpoints").rename(tmp_path / "all")
    (run_dir / "checkpoints").symlink_to(tmp_path / "all")
    with pytest.raises(CheckpointError, match=r"keeps its checkpoints at .*/all, outside of the run folder"):
        _ = load_run(run_dir).checkpoints
    assert len(load_run(run_dir, checkpoint_root=tmp_path / "all").checkpoints) == 1


WRONG = ["x", -1, 2**64 - 1, 1e308, True, None, [None], {"a": 1}]


@pytest.mark.parametrize(
    ("name", "readers"),
    [
        ("run.json", lambda path: [lambda: load_run(path).best_checkpoint_path, lambda: load_run(path).seed]),
        ("status.json", lambda path: [lambda: str(load_run(path)), lambda: RunFolder.reopen(path).close()]),
        ("metrics.jsonl", lambda path: [lambda: str(load_run(path)), lambda: load_run(path).metrics]),
        ("events.jsonl", lambda path: [lambda: load_run(path).seed, lambda: RunFolder.reopen(path).close()]),
    ],
)
def test_whatever_is_in_the_place_of_a_value(name, readers, run_dir):
    data = (run_dir / name).read_bytes()
    lines = [json.loads(line) for line in (data.splitlines() if name.endswith("l") else [data])]
    for number, fields in enumerate(lines):
        for key, wrong in itertools.product(fields, WRONG):
            changed = [*lines[:number], fields | {key: wrong}, *lines[number + 1 :]]
            (run_dir / name).write_text("".join(json.dumps(line) + "\n" for line in changed))
            print(key, wrong)  # for whoever reads a failure
            list(answers(readers(run_dir)))
            assert len(list_runs(run_dir.parent)) == 2


def forged(**changes):
    """A manifest whose checksum is right: who can write a folder can do that too. None takes a field away."""
    file = {"name": "state.json", "num_bytes": 2, "crc32": 0}
    body = {"format": "paceline.checkpoint", "version": 2, "id": 1, "time": 1.0, "score": None, "iteration": 1}
    body |= {"files": [file | changes.pop("file", {})], "world_size": 2, "ranks": [0, 1]} | changes
    body = {key: value for key, value in body.items() if value is not None or key == "score"}
    return json.dumps(body | {"crc32": zlib.crc32(json.dumps(body, sort_keys=True).encode())}).encode()


FORGED = [
    {"version": None},
    *({"world_size": size} for size in (0, -1, 10**9, float("inf"), "x", [])),
    *({"ranks": ranks} for ranks in ([2], [-1], [float("inf")], 3, ["x"])),
    *({"time": time} for time in (float("inf"), float("nan"), "x", [])),
    *({"iteration": iteration} for iteration in (float("inf"), -1, "x")),
    *({"id": id} for id in (float("inf"), None, [])),
    *({"score": score} for score in ("x", [], {})),
    *({"files": files} for files in (None, 1, [1], [{}])),
    *({"file": {"name": name}} for name in ("../x", "a/../../x", "/x", "a\0b", "\ud800", "", ".")),
    *({"file": {"num_bytes": num_bytes}} for num_bytes in (float("inf"), "x", None)),
]


def test_forged_manifest_is_damage():
    assert Manifest.from_bytes(forged(), "there").ranks == (0, 1)
    for changes in FORGED:
        print(changes)  # for whoever reads a failure
        with pytest.raises(CheckpointDamagedError, match=r"there is damaged: checkpoint\.json"):
            Manifest.from_bytes(forged(**changes), "there")


def test_other_version_is_no_damage():
    for version in (0, 3, "x", [], {}):
        with pytest.raises(CheckpointError, match="has format version") as caught:
            Manifest.from_bytes(forged(version=version), "there")
        assert not isinstance(caught.value, CheckpointDamagedError)


def rewrite_manifest(path, names):
    """Names some of the files only."""
    files = [
        {"name": name, "num_bytes": (path / name).stat().st_size, "crc32": zlib.crc32((path / name).read_bytes())}
        for name in names
    ]
    (path / "checkpoint.json").write_bytes(forged(files=files, world_size=1, ranks=[0]))


def test_file_that_the_manifest_does_not_name_is_not_read(run_dir):
    for names in ((), ("arrays.safetensors",), ("state.json",)):
        rewrite_manifest(run_dir / CHECKPOINT, names)
        with pytest.raises(CheckpointDamagedError, match=r"it names no state\.json|KeyError"):
            load(run_dir / CHECKPOINT)


def test_ranks_file_that_the_manifest_does_not_name_is_not_read(tmp_path):
    store = CheckpointStore(tmp_path)
    info = store.write(1, snapshot({"x": 1}))
    own = tmp_path / "checkpoint_000001" / "ranks" / "0"
    own.mkdir(parents=True)
    (own / "state.json").write_text('{"per_rank": {"SECRET": 1}}')
    (own / "arrays.safetensors").write_bytes(b"")
    [state] = json.loads((tmp_path / "checkpoint_000001" / "checkpoint.json").read_bytes())["files"]
    files = [state, {"name": "ranks/0/arrays.safetensors", "num_bytes": 0, "crc32": 0}]
    (tmp_path / "checkpoint_000001" / "checkpoint.json").write_bytes(forged(files=files, world_size=1, ranks=[0]))
    with pytest.raises(CheckpointDamagedError, match=r"it names no ranks/0/state\.json"):
        load(info.path).parts()


def test_file_that_was_added_to_the_users_is_noticed(run_dir):
    path = run_dir / CHECKPOINT
    (path / "files" / "more").mkdir()
    assert load(path).directory
    (path / "files" / "more" / "evil.py").touch()
    with pytest.raises(CheckpointDamagedError, match=r"more/evil\.py is not one of the files that were saved"):
        load(path)
    (path / "files" / "more" / "evil.py").unlink()
    (path / "files" / "others").symlink_to("/")
    with pytest.raises(CheckpointDamagedError, match="files/others is not one of"):
        load(path)


def test_path_that_cannot_be(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    os.mkfifo("pipe")
    for name in ("a\0b", "x" * 300, "\ud800", "~nobody-has-this-name/x", "loop/x", "pipe", "pipe/x"):
        print(repr(name))  # for whoever reads a failure
        with bounded():
            with pytest.raises(RunNotFoundError):
                load_run(name)
            with pytest.raises(CheckpointError):
                load(name)
            assert list_runs(name) == []
            assert CheckpointStore(name).list() == []


def test_checkpoint_that_is_not_for_this_user_is_no_damage(run_dir):
    class Forbidden(LocalStorage):
        """As for anybody but root, who may read everything."""

        def read(self, name, file):
            raise UnreadableFileError(errno.EACCES, "Permission denied", f"{self.root}/{name}/{file}")

    with pytest.raises(CheckpointError, match=r"cannot be read: checkpoint\.json: Permission denied") as caught:
        load_through(Forbidden, run_dir / CHECKPOINT)
    assert not isinstance(caught.value, CheckpointDamagedError)
    assert CheckpointStore(run_dir / "checkpoints", Forbidden(run_dir / "checkpoints")).list() == []
