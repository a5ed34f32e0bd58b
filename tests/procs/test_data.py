"""Data in real runs, on both engines: every row counts once, whoever dies and however many there are."""

import os
import signal
import subprocess
import sys
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from data_ranks import train

import paceline
from paceline import BackendConfig, LocalEngine, Trainer, load_run
from paceline.data import from_numpy, mix, read_parquet

NUM_ROWS = 600
READERS = ["pandas", "pyarrow.parquet", "paceline.data.row_log"]
"""What workers import to read, pyarrow the first of them for its arrays: good to have before they are forked, again and
again."""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    for number in range(3):
        ids = np.arange(number * 200, number * 200 + 200)
        table = pa.table({"id": ids, "x": ids / NUM_ROWS, "y": ids % 2})
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=30)
    return folder


@pytest.fixture(params=["local", "ray"])
def trainer_of(request, tmp_path):
    """Makes Trainers on either engine."""
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")

    def trainer_of(num_workers, **arguments):
        engine = LocalEngine(preload=READERS) if request.param == "local" else request.param
        arguments = {"backend": BackendConfig(), "engine": engine, "logdir": tmp_path / "runs", **arguments}
        return Trainer(num_workers=num_workers, cpus_per_worker=0.5, **arguments)

    return trainer_of


def rows_of(run_dir):
    """How often each row of each epoch counts."""
    frame = load_run(run_dir).metrics
    return Counter((epoch, id) for epoch, ids in zip(frame["epoch"], frame["ids"], strict=True) for id in ids)


def test_every_row_counts_once_whoever_dies_and_however_many_there_are(trainer_of, files, tmp_path):
    """Three workers, two of which are killed in turn; then two go on in the middle of an epoch, with one killed."""
    few = from_numpy({"id": np.arange(1000, 1090), "x": np.ones(90), "y": np.ones(90, int)})
    data = mix({read_parquet(files).filter(lambda row: row["id"] % 5): 0.8, few: 0.2}).random_shuffle(window=60)
    data = data.map(lambda row: {"id": row["id"]})
    config = {"marks": str(tmp_path), "die_at": [4, 9], "leave_at": 17}
    with trainer_of(3) as trainer:
        assert trainer.run(train, config, dataset=data) == [17] * 3
        counts, checkpoint = rows_of(trainer.latest_run_dir), trainer.latest_checkpoint_path
    assert sum(counts.values()) == 17 * 24
    with trainer_of(2) as trainer:
        trainer.run(train, {**config, "die_at": [30], "leave_at": None}, dataset=data, checkpoint=str(checkpoint))
        counts += rows_of(trainer.latest_run_dir)
    expected = [id for id in range(NUM_ROWS) if id % 5] + [*range(1000, 1090)]
    assert counts == Counter((epoch, id) for epoch in range(2) for id in expected)


def test_run_is_resumed_and_its_files_are_found_again(files, tmp_path):
    """What was read is part of the run folder if it is files."""

    def fail_once(config):
        if os.path.exists(f"{config['marks']}/failed"):
            return train({**config, "leave_at": None})
        train(config)
        os.close(os.open(f"{config['marks']}/failed", os.O_CREAT))
        raise LookupError("once")

    config = {"marks": str(tmp_path), "die_at": [], "leave_at": 7}
    engine = LocalEngine(preload=READERS)
    trainer = Trainer(backend=BackendConfig(), num_workers=2, engine=engine, logdir=tmp_path / "runs")
    with trainer, pytest.raises(LookupError):
        trainer.run(fail_once, config, dataset=read_parquet(files).random_shuffle())
    run_dir = trainer.latest_run_dir
    assert load_run(run_dir).request["dataset"]["source"]["num_rows"] == NUM_ROWS
    Trainer.resume(run_dir)
    assert set(rows_of(run_dir).values()) == {1}
    assert sum(rows_of(run_dir).values()) == 2 * NUM_ROWS


def test_elastic_group_shares_what_is_left(files, tmp_path):
    """Three slots; one is lost with its worker in the middle of an epoch, and two go on."""
    engine = LocalEngine(slots=3, preload=READERS)

    class Shrink(paceline.Callback):
        def handle_restart(self, number, reason, **info):
            engine.slots = 2

    config = {"marks": str(tmp_path), "die_at": [6], "leave_at": None}
    arguments = {"backend": BackendConfig(), "engine": engine, "replacement_timeout_s": 0.1}
    with Trainer(num_workers=(1, 3), logdir=tmp_path / "runs", **arguments) as trainer:
        trainer.run(train, config, callbacks=[Shrink()], dataset=read_parquet(files).random_shuffle())
        counts, events = rows_of(trainer.latest_run_dir), load_run(trainer.latest_run_dir).events
    assert [event["world_size"] for event in events if event["kind"] == "resize"] == [2]
    assert set(counts.values()) == {1}
    assert len(counts) == 2 * NUM_ROWS


def fit(config):
    """A line through known points, with a last batch that does not divide evenly."""
    model = paceline.prepare_model(torch.nn.Linear(1, 1, dtype=torch.float64))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in paceline.get_data_shard().to_torch(
        feature_columns=["x"], label_column="y", feature_dtype=np.float64, global_batch_size=64, epochs=2
    ):
        losses = torch.nn.functional.mse_loss(model(x), y[:, None].double(), reduction="none")
        optimizer.zero_grad()
        paceline.mean_over_rows(losses).backward()
        optimizer.step()
    return [parameter.item() for parameter in model.parameters()]


def test_weights_are_the_same_for_any_number_of_ranks(files, tmp_path):
    """The mean over rows is exact also where ranks have one row more or less: 600 = 9 x 64 + 24, of 5 ranks."""
    found = []
    for num_workers in (0, 2, 5):
        with Trainer(num_workers=num_workers, logdir=tmp_path / "runs") as trainer:
            values = trainer.run(fit, {}, dataset=read_parquet(files).random_shuffle())
        assert all(value == values[0] for value in values)
        found.append(values[0])
    assert np.allclose(found[0], found[1], rtol=1e-12)
    assert np.allclose(found[0], found[2], rtol=1e-12)


def test_waiting_for_data_is_reported_when_asked(files, tmp_path, monkeypatch):
    def read():
        for _ in paceline.get_data_shard("train").iter_batches(100):
            paceline.report(x=1)

    monkeypatch.setenv("SGD_RESULT_ENABLE_DETAILED_AUTOFILLED_METRICS", "1")
    with Trainer(backend=BackendConfig(), num_workers=1, logdir=tmp_path / "runs") as trainer:
        trainer.run(read, dataset={"train": read_parquet(files)})
    waited = load_run(trainer.latest_run_dir).metrics["_data_wait_s"]
    assert len(waited) == 6
    assert (waited > 0).all()
    assert waited.sum() < load_run(trainer.latest_run_dir).metrics["_time_total_s"].iloc[-1]


def test_seeds_form_of_the_loop_on_each_side_of_the_door(files, tmp_path):
    def train_func(config):
        if paceline.in_worker():
            dataset = paceline.get_dataset()
            dataloader = dataset.get_split().to_torch(batch_size=config["batch_size"])
            other = dataset.get_shard(1 - paceline.world_rank()).to_torch(batch_size=config["batch_size"])
        return sum(len(x) for x, y in dataloader), sum(len(y) for x, y in other)

    with Trainer(backend="torch", num_workers=2, logdir=tmp_path / "runs") as trainer:
        assert trainer.run(train_func, {"batch_size": 32}, dataset=read_parquet(files)) == [(300, 300), (300, 300)]
        sizes = trainer.run(
            lambda: len(list(torch.utils.data.DataLoader(paceline.get_data_shard(), batch_size=50))),
            dataset=read_parquet(files).select_columns("x"),
        )
    assert sizes == [6, 6]


def step_together(config):
    """Ranks step together, and rank 0 alone reports and saves."""
    checkpoint = paceline.load_checkpoint() or {"step": 0}
    step = checkpoint["step"]
    for batch in paceline.get_data_shard().iter_batches(global_batch_size=60, batch_format="torch", epochs=1):
        step += 1
        ids = torch.zeros(NUM_ROWS)
        ids[batch["id"]] = 1
        torch.distributed.all_reduce(ids)
        if paceline.world_rank() == 0:
            paceline.report(step=step, epoch=0, ids=ids.nonzero().flatten().tolist())
            paceline.save_checkpoint(step=step)
            if step == 5 and not checkpoint["step"]:
                paceline.load_checkpoint()  # waits until it counts
        torch.distributed.barrier()
        if step == 5 and paceline.world_rank() == 1 and not checkpoint["step"]:
            os.kill(os.getpid(), signal.SIGKILL)


def test_rank_0_alone_saves(files, tmp_path):
    """Then the position is rank 0's: right for ranks that step together."""
    with Trainer(backend="torch", num_workers=2, logdir=tmp_path / "runs") as trainer:
        trainer.run(step_together, {}, dataset=read_parquet(files).random_shuffle())
    events = [event["kind"] for event in load_run(trainer.latest_run_dir).events]
    assert "restart" in events
    assert rows_of(trainer.latest_run_dir) == Counter((0, id) for id in range(NUM_ROWS))


def test_trial_shuffles_as_its_config_says(files, tmp_path):
    def train(config):
        shard = paceline.get_dataset().random_shuffle(seed=config["seed"]).get_split()
        assert shard is paceline.get_dataset().random_shuffle(seed=config["seed"]).get_split(), "it is one shard"
        return [int(batch["id"][0]) for batch in shard.iter_batches(100)]

    with Trainer(backend=BackendConfig(), num_workers=0, logdir=tmp_path / "runs") as trainer:
        one, other, again = (trainer.run(train, {"seed": seed}, dataset=read_parquet(files)) for seed in (1, 2, 1))
    assert one == again != other


def test_loop_that_fails_leaves_no_thread_in_a_worker_that_stays(files, tmp_path):
    kept = []

    def fail():
        for _ in paceline.get_data_shard().iter_batches(10):
            raise LookupError("in the middle")

    def threads():
        import threading

        return [thread.name for thread in threading.enumerate() if thread.name.startswith("paceline-read")]

    with Trainer(backend=BackendConfig(), num_workers=0, logdir=tmp_path / "runs") as trainer:
        with pytest.raises(LookupError) as caught:
            trainer.run(fail, dataset=read_parquet(files))
        kept.append(caught)  # with the traceback, and the loop's frame in it
        assert trainer.execute(threads) == [[]]


def test_same_data_in_two_forms_has_two_shards(files, tmp_path):
    def read():
        data, found = paceline.get_dataset(), []
        for _ in range(2):
            plain, doubled = data.get_split(), data.map(lambda row: {"id": row["id"] * 2}).get_split()
            found.append([sum(batch["id"].sum() for batch in shard.iter_batches(100)) for shard in (plain, doubled)])
        return [list(map(int, one)) for one in found], plain.epoch, doubled.epoch

    with Trainer(backend=BackendConfig(), num_workers=0, logdir=tmp_path / "runs") as trainer:
        total = sum(range(NUM_ROWS))
        assert trainer.run(read, dataset=read_parquet(files)) == [([[total, 2 * total]] * 2, 2, 2)]


def test_processes_of_a_loader_may_be_spawned():
    """In a program of its own: Python leaves a process behind where it has spawned one."""
    code = (
        "import numpy as np; from paceline.data import from_numpy\n"
        "loader = from_numpy({'id': np.arange(6)}).to_torch(2, label_column=None, num_workers=1, "
        "multiprocessing_context='spawn')\n"
        "print([x.flatten().tolist() for x in loader])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "[[0, 1], [2, 3], [4, 5]]\n", done.stderr


def test_process_that_is_forked_in_a_loop_cannot_go_on_with_it():
    """It waited for ever for threads that it has not."""
    code = (
        "import os; import numpy as np; from paceline.data import from_numpy\n"
        "batches = iter(from_numpy({'id': np.arange(300)}).map(lambda row: row).iter_batches(5))\n"
        "next(batches)\n"
        "pid = os.fork()\n"
        "try:\n"
        "    print(1 + sum(1 for _ in batches), flush=True)\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, flush=True)\n"
        "if pid: os.waitpid(pid, 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert sorted(done.stdout.split()) == ["60", "DataError"], done.stderr


def test_program_ends_although_somebody_holds_a_loop():
    code = (
        "import numpy as np; from paceline.data import from_numpy\n"
        "held = iter(from_numpy({'id': np.arange(300)}).map(lambda row: row).iter_batches(5))\n"
        "next(held)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
