"""Checkpoints in a bucket of a real server that speaks S3, in its own process."""

import os
import socket
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import boto3
import fsspec.asyn
import numpy as np
import pytest
import torch

import paceline
from paceline.checkpoints import CheckpointStore, CheckpointStrategy, load, snapshot
from paceline.checkpoints.content.files import record_of
from paceline.checkpoints.part import Part
from paceline.checkpoints.writer import Content, PartWriter
from paceline.errors import CheckpointNotFoundError, CheckpointWriteError

SRC = str(Path(__file__).parents[2] / "src")
SERVER = """
    import sys
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server
    server = make_server("127.0.0.1", 0, DomainDispatcherApplication(create_backend_app), threaded=True)
    print(server.server_port, flush=True)
    server.serve_forever()
"""


@pytest.fixture(scope="module")
def endpoint():
    """The address of a server on a free port of its own choice."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SERVER)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module", autouse=True)
def environment(endpoint):
    """What a user sets; for the whole module, as fsspec keeps its connections and threads."""
    loop, pool = fsspec.asyn.get_loop(), ThreadPoolExecutor(1, thread_name_prefix="fsspec")
    pool.submit(int).result()
    loop.call_soon_threadsafe(loop.set_default_executor, pool)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", endpoint)
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        yield


@pytest.fixture
def client(endpoint):
    return boto3.client("s3", endpoint_url=endpoint)


@pytest.fixture
def bucket(client, tmp_path):
    name = tmp_path.name.replace("_", "-").lower()[:40].strip("-")
    client.create_bucket(Bucket=name)
    return name


@pytest.fixture
def store(bucket):
    return CheckpointStore(f"s3://{bucket}/run_001/checkpoints")


def keys(client, bucket):
    return [item["Key"] for item in client.list_objects_v2(Bucket=bucket).get("Contents", [])]


def python(code, *arguments, **environment):
    variables = {**os.environ, "PYTHONPATH": SRC, **environment}
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_commit_list_load(store, client, bucket, tmp_path):
    (tmp_path / "mine" / "sub").mkdir(parents=True)
    (tmp_path / "mine" / "sub" / "a.txt").write_text("hello")
    state = {"epoch": 4, "w": torch.randn(3_000_000), "z": torch.ones(2, dtype=torch.complex128)}
    info = store.write(1, snapshot(state), score=0.5, directory=tmp_path / "mine")
    names = ("arrays.safetensors", "files/sub/a.txt", "state.json")
    assert sorted(keys(client, bucket)) == sorted(
        f"run_001/checkpoints/checkpoint_000001/{key}"
        for key in ("checkpoint.json", *(f"{store.draft_of(1).token}/{name}" for name in names))
    )
    assert store.list() == [info]
    assert info.path == f"s3://{bucket}/run_001/checkpoints/checkpoint_000001"
    back = load(info.path)
    assert back["epoch"] == 4
    assert torch.equal(back["w"], state["w"])
    assert torch.equal(back["z"], state["z"])
    assert (back.directory / "sub" / "a.txt").read_text() == "hello"
    assert back.path == info.path


def test_empty_bucket_and_missing_checkpoint(store):
    assert (store.list(), store.latest(), store.next_id()) == ([], None, 1)
    with pytest.raises(CheckpointNotFoundError, match="nor is there another one"):
        load(store.path_of(1))
    store.write(1, snapshot({}))
    with pytest.raises(CheckpointNotFoundError, match=f"checkpoints in {store.root}: {store.path_of(1)}"):
        load(store.path_of(2))


def test_upload_without_manifest_does_not_exist_for_readers(store, client, bucket):
    store.write(1, snapshot({"x": 1}))
    client.put_object(Bucket=bucket, Key="run_001/checkpoints/checkpoint_000002/state.json", Body=b"{}")
    assert [info.id for info in store.list()] == [1]
    with pytest.raises(CheckpointNotFoundError):
        load(store.path_of(2))
    assert store.next_id() == 3


def test_retention_in_the_bucket(store, client, bucket):
    strategy = CheckpointStrategy(1, "loss", "min")

    def commit(part):
        store.commit([part], world_size=1)
        store.prune(strategy)

    writer = PartWriter(store, 0, commit)
    for id, loss in enumerate((0.5, 0.1, 0.9, 0.7), start=1):
        writer.save(id, Content({"loss": loss, "w": torch.ones(10)}), score=loss)
    writer.close()
    assert [info.id for info in store.list()] == [2, 4]
    assert store.best(strategy).id == 2
    assert {key.split("/")[2] for key in keys(client, bucket)} == {"checkpoint_000002", "checkpoint_000004"}


def put_part(store, rank, files):
    store.put(1, files)
    return Part(1, rank, 0, 0.0, tuple(map(record_of, files)))


def test_parts_of_two_ranks_make_one_checkpoint(store, client, bucket):
    shared, own = snapshot({"w": torch.ones(10)}), snapshot({"per_rank": {"rank": 1}})
    parts = [put_part(store, 1, own.files("ranks/1/")), put_part(store, 0, shared.files())]
    assert (store.list(), store.next_id()) == ([], 2)
    info = store.commit(parts, world_size=2)
    assert store.list() == [info]
    assert load(info.path).all_ranks == [None, {"rank": 1}]
    with pytest.raises(FileExistsError):
        store.commit(parts, world_size=2)
    store.discard(1)
    assert load(info.path)["w"].sum() == 10, "what is committed is no draft"


def test_discarded_draft_leaves_no_object(store, client, bucket):
    put_part(store, 1, snapshot({"per_rank": 1}).files("ranks/1/"))
    store.discard(1)
    store.discard(1)
    assert keys(client, bucket) == []


def test_part_is_missing_in_the_bucket(store, client, bucket):
    part = put_part(store, 0, snapshot({}).files())
    missing = Part(1, 1, 0, 0.0, tuple(map(record_of, snapshot({}).files("ranks/1/"))))
    with pytest.raises(FileNotFoundError, match=r"ranks/1/state\.json"):
        store.commit([part, missing], world_size=2)
    assert store.list() == []


def test_taken_id(store):
    store.write(1, snapshot({"x": 1}))
    with pytest.raises(FileExistsError):
        store.write(1, snapshot({"x": 2}))
    assert load(store.path_of(1)) == {"x": 1}


def test_bucket_does_not_exist(client):
    store = CheckpointStore("s3://no-such-bucket-here/run")
    writer = PartWriter(store, 0, print, sleep=lambda seconds: None)
    writer.save(1, Content({"x": 1}))
    with pytest.raises(CheckpointWriteError, match="no-such-bucket-here"):
        writer.close()
    assert "no-such-bucket-here" not in [item["Name"] for item in client.list_buckets()["Buckets"]]


LOAD = """
    import sys
    from paceline.checkpoints import load
    checkpoint = load(sys.argv[1])
    print(checkpoint["epoch"], float(sum(checkpoint["w"])), (checkpoint.directory / "a").read_text())
    print(checkpoint.directory)
"""


def test_load_in_a_new_process_with_amazons_variable(store, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a").write_text("file")
    info = store.write(1, snapshot({"epoch": 4, "w": np.ones(8)}), directory=tmp_path / "mine")
    values, directory = python(LOAD, info.path).splitlines()
    assert values == "4 8.0 file"
    assert not Path(directory).exists()  # the download went with its process


def test_load_in_a_new_process_with_fsspecs_variable(store, endpoint, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a").write_text("file")
    info = store.write(1, snapshot({"epoch": 4, "w": [1.0] * 8}), directory=tmp_path / "mine")
    output = python(LOAD, info.path, AWS_ENDPOINT_URL="", FSSPEC_S3_ENDPOINT_URL=endpoint)
    assert output.startswith("4 8.0 file\n")


def test_unreachable_server_is_an_os_error():
    code = """
        import sys
        from paceline.checkpoints import load
        try:
            load("s3://bucket/run/checkpoints/checkpoint_000001")
        except OSError as error:
            print("OSError")
    """
    with socket.socket() as probe:  # holds its port, and does not listen
        probe.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{probe.getsockname()[1]}"
        assert python(code, AWS_ENDPOINT_URL=closed, AWS_MAX_ATTEMPTS="1") == "OSError\n"


def test_a_run_saves_to_a_bucket_recovers_from_it_and_another_run_resumes(bucket):
    def train(config):
        checkpoint = paceline.load_checkpoint() or {"step": 0, "weights": np.zeros(2)}
        is_first_attempt = checkpoint["step"] == 0
        weights = checkpoint["weights"]
        for step in range(checkpoint["step"] + 1, config["num_steps"] + 1):
            weights = weights + step
            paceline.save_checkpoint(step=step, weights=weights)
            if is_first_attempt and step == config.get("kill_at"):
                paceline.load_checkpoint()
                os.kill(os.getpid(), 9)
        return weights.tolist()

    strategy = CheckpointStrategy(num_to_keep=2, storage_path=f"s3://{bucket}/models")
    engine = paceline.LocalEngine(preload=["numpy", "s3fs"])
    with paceline.Trainer(paceline.BackendConfig(), num_workers=2, engine=engine) as trainer:
        killed = trainer.run(train, {"num_steps": 4, "kill_at": 2}, checkpoint_strategy=strategy)
        assert killed == [[10.0, 10.0]] * 2
        path = trainer.latest_checkpoint_path
        assert path.startswith(f"s3://{bucket}/models/{trainer.logdir.name}/run_001/checkpoint_")
        assert trainer.latest_checkpoint["step"] == 4
        infos = paceline.load_run(trainer.latest_run_dir).checkpoints
        assert [info.id for info in infos][-2:] == [infos[-1].id - 1, infos[-1].id]
        resumed = trainer.run(train, {"num_steps": 6}, checkpoint=path, checkpoint_strategy=strategy)
        assert resumed == [[21.0, 21.0]] * 2
