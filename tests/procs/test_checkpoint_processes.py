"""Checkpoints and processes that die, run out of disk, or share a folder; and what an import costs."""

import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
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
    import sys, numpy as np
    from paceline.checkpoints import CheckpointStore
    from paceline.checkpoints.storage.local import LocalStorage
    from paceline.checkpoints.writer import Content, PartWriter

    class Stuck:
        # its first part is on disk, its second comes when our stdin ends
        def __init__(self, name, rest=()):
            self.name, self._rest = name, rest
        def chunks(self):
            yield memoryview(b" " * 100)
            print("writing", flush=True)
            sys.stdin.read()
            yield from self._rest

    class StuckStorage(LocalStorage):
        def put(self, draft, files):
            if sys.argv[2] == "put" and draft.name == "checkpoint_000003":
                files = [*files, Stuck("zz")]
            super().put(draft, files)

        def commit(self, draft, manifest, files):
            if sys.argv[2] == "commit" and draft.name == "checkpoint_000003":
                manifest = Stuck(manifest.name, [*manifest.chunks()])
            super().commit(draft, manifest, files)

    root = sys.argv[1]
    store = CheckpointStore(root, StuckStorage(root))
    writer = PartWriter(store, 0, lambda part: store.commit([part], world_size=1))
    for step in (1, 2, 3):
        writer.save(step, Content({"step": step, "w": np.full(1000, float(step))}))
    writer.flush()
"""


def hidden(root):
    return [name for name in os.listdir(root) if name.startswith(".")]


@pytest.mark.parametrize("moment", ["put", "commit"])
def test_process_is_killed_while_writing(tmp_path, moment):
    process = start(KILLED_IN_THE_MIDDLE, tmp_path, moment)
    try:
        assert process.stdout.readline() == "writing\n"
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert process.returncode == -signal.SIGKILL

    store = CheckpointStore(tmp_path)
    assert [info.id for info in store.list()] == [1, 2]
    assert [load(info.path)["step"] for info in store.list()] == [1, 2]
    assert len(hidden(tmp_path)) == 1  # the half-written one, which only the next attempt may clear
    store.write(store.next_id(), snapshot({"step": 3}))
    store.storage.sweep()
    assert sorted(os.listdir(tmp_path)) == ["checkpoint_000001", "checkpoint_000002", "checkpoint_000003"]
    assert load(store.path_of(3)) == {"step": 3}


@pytest.mark.parametrize("moment", ["put", "commit"])
def test_another_writer_leaves_a_living_one_alone(tmp_path, moment):
    process = start(KILLED_IN_THE_MIDDLE, tmp_path, moment)
    try:
        assert process.stdout.readline() == "writing\n"
        store = CheckpointStore(tmp_path)
        store.write(7, snapshot({"from": "the other"}))
        with store.storage.workspace():
            assert len(hidden(tmp_path)) == 2
    finally:
        _, errors = process.communicate(timeout=60)  # ends its stdin, so it goes on
    assert process.returncode == 0, errors
    assert [info.id for info in store.list()] == [1, 2, 3, 7]
    assert load(store.path_of(3))["step"] == 3
    assert hidden(tmp_path) == []


STAGING = """
    import sys
    from paceline.checkpoints import CheckpointStore, snapshot
    store = CheckpointStore(sys.argv[1])
    with store.stage(sys.argv[2]) as staged:
        print("staged", flush=True)
        sys.stdin.read()
        store.put(1, staged.files)
"""


def test_copy_of_a_directory_lives_as_long_as_its_process(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a").touch()
    root = tmp_path / "root"
    living, dying = (start(STAGING, root, tmp_path / "mine") for _ in range(2))
    try:
        for process in (living, dying):
            assert process.stdout.readline() == "staged\n"
        dying.send_signal(signal.SIGKILL)
        dying.communicate()
        CheckpointStore(root).storage.sweep()
        assert len(hidden(root)) == 1
    finally:
        dying.kill()
        _, errors = living.communicate(timeout=60)
    assert living.returncode == 0, errors


MANY_COMMITS = """
    import sys, numpy as np
    from paceline.checkpoints import CheckpointStore, snapshot
    store, mine = CheckpointStore(sys.argv[1]), int(sys.argv[2])
    content = np.full(50_000, mine, np.float32)
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
        np.testing.assert_array_equal(back["w"], np.full(50_000, back["writer"], np.float32), strict=True)
    assert all(name.startswith("checkpoint_") for name in os.listdir(tmp_path))


DISK_FULL = """
    import glob, sys, torch
    from paceline.checkpoints import CheckpointStore
    from paceline.checkpoints.writer import Content, PartWriter
    from paceline.errors import CheckpointWriteError

    store = CheckpointStore(sys.argv[1])
    writer = PartWriter(
        store, 0, lambda part: store.commit([part], world_size=1), sleep=lambda seconds: None,
        on_failure=lambda id, reason: print("left:", glob.glob(sys.argv[1] + "/.*.draft/*")),
    )

    writer.save(1, Content({"step": 1, "w": torch.zeros(10_000)}))
    writer.save(2, Content({"step": 2, "w": torch.zeros(2_000_000)}))
    try:
        writer.flush()
    except CheckpointWriteError as error:
        print(error)
    store.discard(2)
    writer.save(3, Content({"step": 3, "w": torch.zeros(10_000)}))
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
    assert "left: []" in output
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
