"""Checkpoints and processes that die, run out of disk, or share a folder; and what an import costs."""

import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from paceline.checkpoints import CheckpointStore, load, snapshot

SRC = str(Path(__file__).parents[2] / "src")


def start(code, *arguments, **kwargs):
    environment = {**os.environ, "PYTHONPATH": SRC}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        **kwargs,
    )


def run(code, *arguments, **kwargs):
    process = start(code, *arguments, **kwargs)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return output


KILLED_IN_THE_MIDDLE = """
    import sys, torch
    from paceline.checkpoints import CheckpointStore, CheckpointStrategy, CheckpointWriter
    from paceline.checkpoints.storage.local import LocalStorage

    class Stuck:
        # the last file before the manifest: its first part is on disk, its second never comes
        name = "zz"
        def chunks(self):
            yield memoryview(b"x" * 100)
            print("writing", flush=True)
            sys.stdin.read()

    class StuckStorage(LocalStorage):
        def write(self, name, files):
            if name == "checkpoint_000003":
                # the manifest is known already when the last chunk is asked for, as in any write
                files = [*files[:-1], Stuck(), files[-1]]
            super().write(name, files)

    root = sys.argv[1]
    store = CheckpointStore(root, StuckStorage(root))
    writer = CheckpointWriter(store, CheckpointStrategy(), 1, lambda info: None)
    for step in (1, 2, 3):
        writer.save({"step": step, "w": torch.full((1000,), float(step))})
    writer.flush()
"""


def test_worker_is_killed_while_writing(tmp_path):
    process = start(KILLED_IN_THE_MIDDLE, tmp_path)
    try:
        assert process.stdout.readline() == "writing\n"
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert process.returncode == -signal.SIGKILL

    store = CheckpointStore(tmp_path)
    assert [info.id for info in store.list()] == [1, 2]
    assert [load(info.path)["step"] for info in store.list()] == [1, 2]
    staging = [name for name in os.listdir(tmp_path) if name.startswith(".")]
    assert len(staging) == 1  # the half-written one, which only the next writer may clear
    store.write(store.next_id(), snapshot({"step": 3}))
    assert sorted(os.listdir(tmp_path)) == ["checkpoint_000001", "checkpoint_000002", "checkpoint_000003"]
    assert load(store.path_of(3)) == {"step": 3}


def test_living_writer_is_not_swept_by_another(tmp_path):
    process = start(KILLED_IN_THE_MIDDLE, tmp_path)
    try:
        assert process.stdout.readline() == "writing\n"
        store = CheckpointStore(tmp_path)
        store.write(7, snapshot({"from": "the other"}))
        assert len([name for name in os.listdir(tmp_path) if name.startswith(".")]) == 1
    finally:
        _, errors = process.communicate(timeout=60)  # ends its stdin, so it goes on
    assert process.returncode == 0, errors
    assert [info.id for info in store.list()] == [1, 2, 3, 7]
    assert load(store.path_of(3))["step"] == 3


MANY_COMMITS = """
    import sys, torch
    from paceline.checkpoints import CheckpointStore, snapshot
    store, mine = CheckpointStore(sys.argv[1]), int(sys.argv[2])
    content = torch.full((50_000,), float(mine))
    print("ready", flush=True)
    sys.stdin.readline()
    won = []
    for id in range(1, 31):
        try:
            store.write(id, snapshot({"writer": mine, "w": content}))
            won.append(id)
        except FileExistsError:
            pass
    print(won)
"""


def test_two_writers_on_one_folder(tmp_path):
    writers = [start(MANY_COMMITS, tmp_path, number) for number in (1, 2)]
    for writer in writers:
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        writer.stdin.write("go\n")
        writer.stdin.flush()
    won = []
    for writer in writers:
        output, errors = writer.communicate(timeout=120)
        assert writer.returncode == 0, errors
        won.append(json.loads(output))
    assert sorted(won[0] + won[1]) == list(range(1, 31))  # each id has exactly one owner, and no one lost any
    for id in range(1, 31):
        back = load(CheckpointStore(tmp_path).path_of(id))
        assert id in won[back["writer"] - 1]
        assert torch.equal(back["w"], torch.full((50_000,), float(back["writer"])))
    assert all(name.startswith("checkpoint_") for name in os.listdir(tmp_path))


DISK_FULL = """
    import sys, torch
    from paceline.checkpoints import CheckpointStore, CheckpointStrategy, CheckpointWriter
    from paceline.errors import CheckpointWriteError

    writer = CheckpointWriter(
        CheckpointStore(sys.argv[1]), CheckpointStrategy(), 1, lambda info: None, sleep=lambda seconds: None
    )
    writer.save({"step": 1, "w": torch.zeros(10_000)})
    writer.save({"step": 2, "w": torch.zeros(2_000_000)})
    try:
        writer.flush()
    except CheckpointWriteError as error:
        print(error)
    writer.save({"step": 3, "w": torch.zeros(10_000)})
    writer.close()
"""


@pytest.fixture
def tiny_disk(tmp_path):
    """A real file system of 4 MB; where we may not mount one, a limit on the size of files."""
    path = tmp_path / "disk"
    path.mkdir()
    if os.geteuid() == 0:
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", path], capture_output=True)
        if mounted.returncode == 0:
            yield path, {}
            subprocess.run(["umount", path], check=True)
            return
    yield path, {"preexec_fn": limit_file_size}


def limit_file_size():
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * 2**20, 4 * 2**20))


def test_disk_full_while_saving(tiny_disk):
    path, options = tiny_disk
    output = run(DISK_FULL, path, **options)
    assert "checkpoint_000002 could not be written after 3 attempts" in output
    assert "No space left" in output or "File too large" in output
    assert "Free space there" in output
    assert sorted(os.listdir(path)) == ["checkpoint_000001", "checkpoint_000003"]
    assert [load(path / name)["step"] for name in sorted(os.listdir(path))] == [1, 3]


def test_import_loads_no_library():
    code = """
        import sys, paceline.checkpoints
        print(sorted({"torch", "numpy", "fsspec"} & set(sys.modules)))
        state = paceline.checkpoints.copy_of({"x": [1, 2.0, b"3", (4,)]})
        paceline.checkpoints.CheckpointStore(sys.argv[1]).list()
        print(sorted({"torch", "numpy", "fsspec"} & set(sys.modules)), state)
    """
    assert run(code, "/nowhere").splitlines() == ["[]", "[] {'x': [1, 2.0, b'3', (4,)]}"]


def test_checkpoint_of_plain_values_loads_without_torch_and_one_with_tensors_says_what_it_needs(tmp_path):
    store = CheckpointStore(tmp_path)
    store.write(1, snapshot({"epoch": 4}))
    store.write(2, snapshot({"w": torch.ones(2)}))
    code = """
        import sys
        sys.modules["torch"] = None  # as if it were not installed
        from paceline.checkpoints import load
        from paceline.errors import MissingDependencyError
        print(load(sys.argv[1]))
        try:
            load(sys.argv[2])
        except MissingDependencyError as error:
            print(error)
    """
    first, second = run(code, store.path_of(1), store.path_of(2)).splitlines()
    assert first == "{'epoch': 4}"
    assert "pip install 'paceline[torch]'" in second


def test_missing_package_for_a_url_is_named():
    code = """
        import sys
        sys.modules["s3fs"] = None
        from paceline.checkpoints import load
        try:
            load("s3://bucket/run/checkpoints/checkpoint_000001")
        except ImportError as error:
            print(error)
    """
    assert "pip install s3fs" in run(code)
