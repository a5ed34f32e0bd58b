"""Prepared batches: the same as those on the fly, bit by bit, or none; and a cache that nothing spoils."""

import fcntl
import os
import resource
import shutil
import signal
import time
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import typed_experiment
from torch.utils.data import Dataset, IterableDataset

import paceline
from paceline import Trainer
from paceline.data import sample_rng
from paceline.data.prepared_cache import LOCK, MANIFEST, ROWS, Draft, hold, is_whole, prepared_dir, remove
from paceline.data.prepared_cleaning import Entry, Policy, clean, entries, to_remove
from paceline.data.torch_equal import RowsHash, is_same
from paceline.data.torch_prepared import PreparedRows, Writer
from paceline.experiment import build_experiment, load, run_experiment, schema_of
from paceline.experiment.preparing import prepare_datasets
from paceline.experiment.shards import shards_of

SCHEMA = schema_of(typed_experiment.Experiment)


@pytest.fixture(autouse=True)
def storage(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_STORAGE", str(tmp_path))
    return tmp_path / ".prepared"


class Told(list):
    def __call__(self, text):
        self.append(text)

    @property
    def all(self):
        return "\n".join(self)


def prepare(dataset, told=None, **options):
    """A typed experiment that has this dataset for training."""
    plan = load(SCHEMA, "", [])
    experiment = build_experiment(plan)
    experiment.datasets = type("Datasets", (), {})()
    experiment.datasets.train = dataset
    return prepare_datasets(experiment, plan, Told() if told is None else told, **options), experiment.datasets


def batches_of(datasets, prepared=None, epochs=2, **options):
    shard = shards_of(datasets, None if prepared is None else prepared.paths).train
    loader = shard.iter_torch_batches(7, collate_fn=datasets.train.ray_map_batches, **options)
    return [batch for _ in range(epochs) for batch in loader]


def check_same(dataset):
    prepared, datasets = prepare(dataset, told := Told())
    assert list(prepared.paths) == ["train"], told
    expected, found = batches_of(datasets), batches_of(datasets, prepared)
    prepared.release()
    assert len(expected) == len(found) > 2
    assert all(map(is_same, expected, found))


class Squares(Dataset):
    batch_size = 4

    def __init__(self, num_rows=40, shuffle=True):
        self.num_rows, self.shuffle, self.num_read = num_rows, shuffle, 0

    def __len__(self):
        return self.num_rows

    def __getitem__(self, index):
        self.num_read += 1
        return torch.tensor(float(index)), index * index

    @staticmethod
    def ray_map_batches(batch):
        rows = batch["item"]
        return {"x": torch.stack([row[0] for row in rows]), "y": torch.tensor([row[1] for row in rows])}


# --- equal -----------------------------------------------------------------------------------------------------------

VALUES = {
    "scalars": lambda n: torch.tensor(float(n)),
    "matrix": lambda n: torch.full((2, 3), n, dtype=torch.float64),
    "bool": lambda n: torch.tensor([n % 2 == 0, True]),
    "bfloat16": lambda n: torch.tensor([n / 7], dtype=torch.bfloat16),
    "float16": lambda n: torch.tensor([n / 7], dtype=torch.float16),
    "complex": lambda n: torch.tensor([complex(n, -n)]),
    "int8": lambda n: torch.tensor([n % 100], dtype=torch.int8),
    "nan": lambda n: torch.tensor([float("nan"), -0.0, float("inf")]),
    "nothing": lambda n: torch.empty(0, 2),
}


def of_values(make):
    class Values(Squares):
        @staticmethod
        def ray_map_batches(batch):
            return {"v": torch.stack([make(row[1]) for row in batch["item"]])}

    return Values()


@pytest.mark.parametrize("kind", VALUES)
def test_tensors_of_every_kind_are_the_same_bit_by_bit(kind):
    check_same(of_values(VALUES[kind]))


class Nested(Squares):
    @staticmethod
    def ray_map_batches(batch):
        numbers = [row[1] for row in batch["item"]]
        return {
            "deep": {
                "pair": (torch.tensor(numbers), np.array(numbers, np.int32)),
                "text": [f"row {n}" for n in numbers],
            },
            "ragged": [torch.arange(n % 5).reshape(1, -1) for n in numbers],
            "maybe": [None if n % 2 else n for n in numbers],
            "raw": [bytes([n % 256]) for n in numbers],
        }


@pytest.mark.parametrize("dataset", [Nested(), Squares(), Squares(shuffle=False), Squares(600)])
def test_batches_are_those_on_the_fly_in_every_epoch(dataset):
    check_same(dataset)


def test_rows_of_several_blocks_are_gathered(tmp_path):
    writer = Writer(tmp_path / "rows", block_bytes=100)
    for first in range(0, 60, 10):
        writer.add({"x": torch.arange(first, first + 10), "t": [str(n) for n in range(first, first + 10)]}, 10)
    writer.close()
    rows = PreparedRows(tmp_path / "rows")
    assert (len(rows), len(rows._blocks)) == (60, 6)
    got = rows.gather([59, 0, 31, 31])
    assert (got["x"].tolist(), got["t"]) == ([59, 0, 31, 31], ["59", "0", "31", "31"])
    got["x"][0] = 7  # it is the user's
    assert rows.gather([59])["x"].tolist() == [59]


class Stream(IterableDataset):
    batch_size = 4

    def __iter__(self):
        return iter(range(30))

    @staticmethod
    def ray_map_batches(batch):
        return {"x": torch.tensor(batch["item"])}


def test_iterable_dataset_is_prepared_in_its_order():
    check_same(Stream())


def test_rows_themselves_are_still_there():
    prepared, datasets = prepare(Squares(10, shuffle=False))
    shard = shards_of(datasets, prepared.paths).train
    mapped = next(iter(shard.iter_torch_batches(4, collate_fn=datasets.train.ray_map_batches)))
    other = next(iter(shard.iter_torch_batches(4, collate_fn=lambda batch: [row[1] for row in batch["item"]])))
    prepared.release()
    assert (mapped["y"].tolist(), other) == ([0, 1, 4, 9], [0, 1, 4, 9])


# --- not prepared ----------------------------------------------------------------------------------------------------


class Drawn(Squares):
    @staticmethod
    def ray_map_batches(batch):
        return {"x": torch.rand(len(batch["item"]))}


class DrawnRows(Squares):
    def __getitem__(self, index):
        return torch.tensor(sample_rng().random()), index


class Padded(Squares):
    @staticmethod
    def ray_map_batches(batch):
        longest = max(row[1] for row in batch["item"])
        return {"x": torch.stack([torch.zeros(longest + 1) for _ in batch["item"]])}


class Normalized(Squares):
    @staticmethod
    def ray_map_batches(batch):
        x = torch.stack([row[0] for row in batch["item"]])
        return {"x": x - x.mean()}


class Grows(Stream):
    def set_epoch(self, epoch):
        self.epoch = epoch


class Fails(Squares):
    @staticmethod
    def ray_map_batches(batch):
        raise KeyError("label")


class Summed(Squares):
    @staticmethod
    def ray_map_batches(batch):
        return {"total": torch.tensor(sum(row[1] for row in batch["item"]))}


class Objects(Squares):
    @staticmethod
    def ray_map_batches(batch):
        return {"x": [object() for _ in batch["item"]]}


class NoMap(Squares):
    ray_map_batches = None


@pytest.mark.parametrize(
    ("dataset", "why"),
    [
        (Drawn(), "Are random numbers drawn"),
        (DrawnRows(), "Are random numbers drawn"),
        (Padded(), "padded to its longest row"),
        (Normalized(), "together with other rows"),
        (Grows(), "set_epoch"),
        (Fails(), "KeyError: 'label'"),
        (Summed(), "expected a row for each"),
        (Objects(), "not all text, numbers or tensors"),
        (NoMap(), "has no ray_map_batches"),
        (Squares(0), "it has no rows"),
    ],
    ids=lambda one: type(one).__name__ if isinstance(one, Dataset) else "",
)
def test_what_would_not_be_the_same_is_made_on_the_fly_and_said(dataset, why, storage):
    prepared, _ = prepare(dataset, told := Told())
    assert prepared.paths == {}
    assert "datasets.train is not prepared: " in told.all
    assert why in told.all
    assert "made on the fly" in told.all
    assert not storage.exists() or os.listdir(storage) == []


@contextmanager
def small_disk(num_bytes):
    """Files of this process cannot grow beyond that."""
    former, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, former[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)
        signal.signal(signal.SIGXFSZ, handler)


def test_disk_full_while_preparing(storage):
    told = Told()
    with small_disk(3000):
        prepared, _ = prepare(Squares(2000), told)
    assert prepared.paths == {}
    assert "cannot take it: File too large. Its batches are made on the fly. `paceline data gc` makes room" in told.all
    assert os.listdir(storage) == []


def test_place_that_is_no_folder(tmp_path):
    (tmp_path / ".prepared").write_text("in the way")
    prepared, _ = prepare(Squares(), told := Told())
    assert prepared.paths == {}
    assert "cannot take it" in told.all


# --- used again ------------------------------------------------------------------------------------------------------


class Own(Squares):
    def fingerprint(self):
        return f"squares {self.num_rows}"


def test_prepared_once_for_the_same_data():
    first, _ = prepare(Squares(30))
    again, _ = prepare(Squares(30), told := Told())
    other, _ = prepare(Squares(31))
    for one in (first, again, other):
        one.release()
    assert first.paths == again.paths != other.paths
    assert "is prepared already" in told.all


def test_fingerprint_of_its_own_spares_reading():
    first, _ = prepare(Own(300))
    dataset = Own(300)
    again, _ = prepare(dataset)
    other, _ = prepare(Own(299))
    for one in (first, again, other):
        one.release()
    assert first.paths == again.paths != other.paths
    assert dataset.num_read == 0


def test_other_rows_another_map_or_other_arguments_are_prepared_anew():
    class Shifted(Squares):
        def __getitem__(self, index):
            return torch.tensor(float(index)), index * index + shift

    class Scaled(Squares):
        def __init__(self, scale):
            super().__init__()
            self.scale = scale

        def ray_map_batches(self, batch):
            return {"y": torch.tensor([self.scale * row[1] for row in batch["item"]])}

    for kind in (Shifted, Scaled):
        kind.__qualname__ = kind.__name__
    shift = 0
    made = [prepare(Shifted())[0]]
    shift = 1
    made += [prepare(one)[0] for one in (Shifted(), Scaled(1), Scaled(2), Scaled(2))]
    paths = [one.paths["train"] for one in made]
    for one in made:
        one.release()
    assert len(set(paths)) == 4
    assert paths[3] == paths[4]


def change_rows(path):
    raw = bytearray((path / ROWS).read_bytes())
    raw[len(raw) // 2] ^= 1
    (path / ROWS).write_bytes(raw)


@pytest.mark.parametrize(
    "damage",
    [
        change_rows,
        lambda path: (path / ROWS).write_bytes((path / ROWS).read_bytes()[:-1]),
        lambda path: (path / ROWS).unlink(),
        lambda path: (path / MANIFEST).write_text("{"),
        lambda path: (path / MANIFEST).unlink(),
        lambda path: (path / LOCK).unlink(),
    ],
)
def test_damaged_rows_are_made_anew(damage, storage):
    first, _ = prepare(Squares())
    first.release()
    [path] = [storage / name for name in os.listdir(storage)]
    damage(path)
    check_same(Squares())
    assert is_whole(path)
    assert os.listdir(storage) == [path.name]


def test_of_two_that_prepare_at_once_one_stands(storage):
    drafts = [Draft(storage), Draft(storage)]
    holds = []
    for draft in drafts:
        writer = Writer(draft.path / ROWS)
        writer.add({"x": torch.arange(3)}, 3)
        writer.close()
        told = {"num_rows": 3, "num_bytes": writer.num_bytes, "crc32": writer.crc32, "source": "a.B"}
        holds.append(draft.commit("a" * 32, told))
    assert [one.path for one in holds] == [storage / ("a" * 32)] * 2
    assert os.listdir(storage) == ["a" * 32]
    assert not remove(storage, "a" * 32)
    for one in holds:
        one.release()
    assert remove(storage, "a" * 32)
    assert hold(storage / ("a" * 32)) is None


def test_rows_are_told_apart():
    def digest(*rows):
        made = RowsHash()
        for row in rows:
            made._add(row)
        return made.hexdigest()

    zeros = torch.zeros(2)
    rows = [
        (zeros,), (zeros, 0), (torch.zeros(1, 2),), (zeros.double(),), (np.zeros(2),), ("ab",), ("a", "b"),
        (["a", "b"],), (b"ab",), (1,), (1.0,), (True,), (None,), ({"a": 1},), ({"b": 1},), (torch.nn.ReLU(),),
    ]  # fmt: skip
    assert len({digest(*row) for row in rows}) == len(rows)
    assert digest(torch.zeros(2), "a") == digest(torch.zeros(2), "a")


# --- a run -----------------------------------------------------------------------------------------------------------


def run(name, *overrides, **options):
    words = [f"cfg.name={name}", "cfg.start_workers=0", "cfg.num_epochs=2", "cfg.seed=1", *overrides]
    return run_experiment(typed_experiment.Exact, overrides=words, **options)


def test_run_on_prepared_batches_ends_the_same(storage):
    assert run("mapped", prepare_batches=True).values == run("on_the_fly").values
    assert {entry.source for entry in entries(storage)} == {"typed_experiment.Numbers"}
    assert not any(entry.is_in_use for entry in entries(storage))


def test_run_goes_on_without_the_cache_that_it_began_with(storage, caplog):
    with pytest.raises(RuntimeError, match="as asked"):
        run("interrupted", "cfg.fail_at=[1, 1]", "cfg.save_every=1", prepare_batches=True)
    shutil.rmtree(storage)
    assert Trainer.resume("interrupted") == run("uninterrupted", "cfg.save_every=1").values
    assert "does not see the prepared batches" in caplog.text
    assert "PACELINE_STORAGE" in caplog.text
    batches = paceline.load_run("interrupted").metrics.query("epoch == 1 and batch.notna()")["batch"]
    assert batches.tolist() == [0, 1, 2, 3, 4, 5]


# --- cleaning --------------------------------------------------------------------------------------------------------

DAY = 86_400.0


def entry(key, num_bytes=10, days=0.0, **fields):
    return Entry(key, num_bytes, -days * DAY, 1, "a.B", **fields)


@pytest.mark.parametrize(
    ("policy", "gone"),
    [
        (Policy(30 * DAY, 1e9), {"old": "age"}),
        (Policy(100 * DAY, 40), {}),
        (Policy(100 * DAY, 30), {"old": "size"}),
        (Policy(100 * DAY, 25), {"old": "size", "middle": "size"}),
        (Policy(2 * DAY, 10), {"old": "age", "middle": "age", "new": "size"}),
        (Policy(0, 0), {"old": "age", "middle": "age", "new": "size"}),
    ],
)
def test_what_was_used_least_recently_goes_first(policy, gone):
    found = [entry("new"), entry("middle", days=5), entry("held", days=50, is_in_use=True), entry("old", days=40)]
    assert {one.key: why for one, why in to_remove(found, policy, 0.0)} == gone


def test_what_somebody_reads_stays(storage):
    prepared, _ = prepare(Squares())
    [found] = entries(storage)
    assert found.is_in_use
    assert clean(storage, Policy(0, 0), time.time() + DAY) == []
    prepared.release()
    assert [one.key for one, _ in clean(storage, Policy(0, 0), time.time() + DAY)] == [found.key]
    assert os.listdir(storage) == []


def test_what_the_killed_have_left_goes_and_what_others_write_stays(storage):
    writing, left = Draft(storage), Draft(storage)
    os.close(left._fd)  # as when its process ends
    (storage / ".gone-00").mkdir()
    (storage / "somebody's").mkdir()
    clean(storage, now=time.time() + 120)
    assert set(os.listdir(storage)) == {writing.path.name, "somebody's"}
    clean(storage, now=time.time() + 2 * DAY)
    assert set(os.listdir(storage)) == {writing.path.name, "somebody's"}
    writing.discard()


def test_draft_that_grows_stays_where_there_are_no_locks(storage, monkeypatch):
    monkeypatch.setattr("paceline.data.prepared_cleaning.locked", lambda fd, kind: None)
    writing, left = Draft(storage), Draft(storage)
    for draft in (writing, left):
        for path in (draft.path / LOCK, draft.path):
            os.utime(path, (0, 0))
    (writing.path / ROWS).write_bytes(b"rows")
    os.utime(writing.path, (0, 0))
    os.close(left._fd)
    clean(storage)
    assert os.listdir(storage) == [writing.path.name]
    writing.discard()


def test_nothing_outside_of_the_cache_is_touched(storage, tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("mine")
    storage.mkdir()
    (storage / ("b" * 32)).symlink_to(precious)
    (storage / ".gone-01").symlink_to(precious)
    inner = storage / ("c" * 32)
    inner.mkdir()
    (inner / "out").symlink_to(precious)
    os.utime(inner, (0, 0))
    clean(storage, Policy(0, 0))
    assert (precious / "file").read_text() == "mine"
    assert not inner.exists()
    for name in ("..", ".", "../precious", "", str(precious)):
        assert not remove(storage, name)
    assert (precious / "file").read_text() == "mine"


def test_preparing_cleans_what_is_old(storage):
    prepare(Squares())[0].release()
    [old] = entries(storage)
    os.utime(storage / old.key / LOCK, (0, 0))
    prepared, _ = prepare(Squares(41), told := Told())
    prepared.release()
    assert old.key not in os.listdir(storage)
    assert "from the cache of prepared batches (age)" in told.all


def test_use_is_noted(storage):
    prepare(Squares())[0].release()
    [old] = entries(storage)
    os.utime(storage / old.key / LOCK, (0, 0))
    hold(storage / old.key).release()
    assert entries(storage)[0].used > 0


def test_lock_of_another_reader_is_seen(storage):
    prepare(Squares())[0].release()
    [found] = entries(storage)
    fd = os.open(storage / found.key / LOCK, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
        assert entries(storage)[0].is_in_use
    finally:
        os.close(fd)
    assert not entries(storage)[0].is_in_use


def test_place_of_the_cache(monkeypatch, tmp_path):
    assert prepared_dir() == tmp_path / ".prepared"
    assert prepared_dir("/elsewhere") == prepared_dir("/elsewhere/") != tmp_path
    monkeypatch.delenv("PACELINE_STORAGE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert prepared_dir() == tmp_path / "cache/paceline/prepared"
