"""Which rows went into which step, with real workers that are killed, and fewer of them in the end."""

import os
import random
import signal
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import paceline
from paceline import BackendConfig, LocalEngine, SGDCallback, Trainer
from paceline.data import audit, diff, read_parquet

NUM_ROWS = 3000


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "rows.parquet"
    table = pa.table({"id": np.arange(NUM_ROWS) * 3, "x": np.random.default_rng(0).random(NUM_ROWS)})
    pq.write_table(table, path, row_group_size=250)
    return read_parquet(path).random_shuffle()


def train(config):
    """No rank waits for another: they are at different batches when they save, and when one of them dies."""
    if config["goes_on"]:
        paceline.load_checkpoint()
    rank, shard = paceline.world_rank(), paceline.get_data_shard()
    for number, batch in enumerate(shard.iter_batches(global_batch_size=90, epochs=2), 1):
        die_if_due(config, rank, number, "before the report")
        if config["saves"] == "first" and number % 4 == 0:
            paceline.save_checkpoint(number=number)
        paceline.report(num_rows=len(batch["x"]))
        die_if_due(config, rank, number, "before the save")
        if number % 4 == 0 and (config["saves"] == "last" or (config["saves"] == "rank 0" and rank == 0)):
            paceline.save_checkpoint(number=number)
        die_if_due(config, rank, number, "after the save")


def die_if_due(config, rank, number, where):
    for place, kill in enumerate(config["kills"]):
        marker = f"{config['dir']}/{place}"
        is_next = not os.path.exists(marker) and (place == 0 or os.path.exists(f"{config['dir']}/{place - 1}"))
        if is_next and kill == [rank, number, where]:
            while not os.path.exists(f"{config['dir']}/checkpoint_{place + 1}"):  # there is one to go on from
                threading.Event().wait(0.005)
            open(marker, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)


class Driver(SGDCallback):
    """Tells workers how many checkpoints there are, and has fewer workers after so many restarts."""

    def __init__(self, engine, num_restarts, folder):
        self.engine, self.num_restarts, self.folder, self.num_checkpoints = engine, num_restarts, folder, 0

    def handle_checkpoint(self, checkpoint, **info):
        self.num_checkpoints += 1
        (self.folder / f"checkpoint_{self.num_checkpoints}").touch()

    def handle_restart(self, attempt, reason, **info):
        if attempt == self.num_restarts:
            self.engine.slots = 2


def trained(data, tmp_path, kills, saves="last", goes_on=True, record_ids=True, sizes=(2, 3)):
    engine = LocalEngine(preload=["pandas", "pyarrow.parquet", "paceline.data.row_log"], slots=sizes[1])
    config = {"dir": str(tmp_path), "kills": kills, "goes_on": goes_on, "saves": saves}
    options = {"num_workers": sizes, "engine": engine, "max_retries": 5, "replacement_timeout_s": 0.0}
    with Trainer(BackendConfig(), logdir=tmp_path / "runs", **options) as trainer:
        callbacks = [Driver(engine, len(kills), tmp_path)]
        trainer.run(train, config, callbacks=callbacks, dataset=data, record_ids=record_ids)
        return trainer.latest_run_dir


def numbers(report):
    return [(one.epoch, one.state, one.once, one.twice, one.never) for one in report.epochs]


EACH_ONCE = [(epoch, "finished", NUM_ROWS, 0, 0) for epoch in range(2)]


@pytest.mark.parametrize(("saves", "record_ids", "seed"), [("last", True, 1), ("first", "id", 2)])
def test_killed_twice_and_shrunk_yet_every_row_came_once(data, tmp_path, saves, record_ids, seed):
    draw = random.Random(seed)
    places = ["before the report", "before the save", "after the save"]
    kills = [[draw.randrange(3), draw.randrange(5, 30), draw.choice(places)] for _ in range(2)]
    run_dir = trained(data, tmp_path, kills, saves, record_ids=record_ids)
    report = audit(run_dir)
    assert numbers(report) == EACH_ONCE, (kills, str(report))
    assert report.is_clean
    begun = [event["world_size"] for event in paceline.load_run(run_dir).events if event["kind"] == "attempt"]
    assert begun == [3, 3, 2]
    assert os.path.getsize(run_dir / "rows.bin") < 100_000


def test_rows_that_are_read_again_are_found(data, tmp_path):
    """The function does not go on where its checkpoint was, and so reads from the first row on."""
    run_dir = trained(data, tmp_path, [[0, 10, "after the save"]], goes_on=False)
    report = audit(run_dir)
    first = report.epochs[0]
    assert not report.is_clean
    assert first.twice > 0
    assert first.never == 0
    assert len({step for step, _ in first.twice_rows[0].at}) == 2
    assert "came more than once\n" in str(report)


def test_two_runs_with_the_same_rows_in_each_step(data, tmp_path):
    """With any number of workers, as long as all ranks are equally far when they save."""
    paths = [tmp_path / name for name in ("one", "two")]
    for path in paths:
        path.mkdir()
    one = trained(data, paths[0], [], sizes=(3, 3))
    two = trained(data, paths[1], [], sizes=(2, 2))
    assert diff(one, two) is None
    assert numbers(audit(one)) == numbers(audit(two)) == EACH_ONCE
