"""Threads that read ahead: they end with their loop, or are left behind, and nobody waits for ever."""

import logging
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from paceline.data import from_numpy, read_parquet, readers
from paceline.data.readers import Readers
from paceline.data.shard import Shard


def ids_of(batches):
    return [int(number) for batch in batches for number in batch["id"]]


def reading():
    return [thread for thread in threading.enumerate() if thread.name.startswith("paceline-")]


@pytest.fixture
def stuck(monkeypatch):
    """A function of a row that does not return for rows from 10 on, until the test is over; and whether it was met."""
    monkeypatch.setattr(readers, "LEAVE_S", 0.05)
    free, met = threading.Event(), threading.Event()

    def stuck(row):
        if row["id"] >= 10:
            met.set()
            free.wait()
        return row

    stuck.met = met
    yield stuck
    free.set()
    for thread in reading():
        thread.join()


@pytest.mark.parametrize("op", ["map", "filter"])
def test_loop_is_left_although_a_function_does_not_return(op, stuck, tmp_path, caplog):
    pq.write_table(pa.table({"id": range(60)}), tmp_path / "a.parquet", row_group_size=10)
    data = getattr(read_parquet(tmp_path, lanes=1), op)(stuck)
    with caplog.at_level(logging.WARNING):
        for _ in data.iter_batches(5):
            assert stuck.met.wait(60)
            break
    assert "is left behind" in caplog.text
    assert all(thread.daemon for thread in reading())


@pytest.mark.parametrize("num_ahead", [0, 1, 3])
def test_threads_end_with_their_loop(num_ahead, tmp_path):
    pq.write_table(pa.table({"id": range(600)}), tmp_path / "a.parquet", row_group_size=10)
    data = read_parquet(tmp_path)
    for num_batches in (1, 3, None):
        batches = iter(data.iter_batches(7, prefetch_batches=num_ahead))
        had = [batch for _, batch in zip(range(num_batches or 10**6), batches, strict=False)]
        assert num_batches is None or reading()
        assert len(had) == (num_batches or 86)
        batches.close()
        assert not reading()


def test_so_many_batches_are_ahead_and_no_more():
    made = []
    batches = iter(from_numpy({"id": np.arange(100)}).map(lambda row: made.append(row["id"]) or row).iter_batches(1))
    next(batches)
    [filler] = [thread for thread in reading() if thread.name.startswith("paceline-batches")]
    while len(made) < 4 and filler.is_alive():
        threading.Event().wait(0.001)
    batches.close()
    assert len(made) == 4  # the one that was had, two ahead, and the one that waits for room


def test_what_comes_after_the_end_is_cancelled():
    with Readers(1, "test") as pool:
        assert pool.submit(int, "3").result() == 3
        with pytest.raises(ValueError, match="invalid literal"):
            pool.submit(int, "x").result()
    assert pool.submit(int, "3").cancelled()
    pool.shutdown()


def test_loops_of_several_threads_have_epochs_of_their_own():
    """All of them begin before any has had a batch."""
    told, begun = [], threading.Barrier(4)

    class Slow(Shard):
        def begin_loop(self, size):
            made = super().begin_loop(size)
            begun.wait()
            return made

    data = from_numpy({"id": np.arange(50)})
    shard = Slow(data.tree, on_rows=lambda epoch, ids: told.extend((epoch, number) for number in ids.tolist()))
    threads = [threading.Thread(target=lambda: list(shard.iter_batches(7))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(told) == [(epoch, number) for epoch in range(4) for number in range(50)]
