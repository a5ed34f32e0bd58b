"""The background writer: what blocks, what fails when, what is left on disk. Faults are values handed in."""

import errno
import os
import pickle
import threading

import pytest
import torch

from paceline.checkpoints import CheckpointStore, CheckpointStrategy, CheckpointWriter, load, snapshot
from paceline.checkpoints.storage.local import LocalStorage
from paceline.errors import ArgumentError, CheckpointError, CheckpointValueError, CheckpointWriteError


class FaultyStorage(LocalStorage):
    """Fails the given calls of `write` (counted from 1) as a full disk does: in the middle."""

    def __init__(self, root, failing=(), error=None):
        super().__init__(root)
        self.failing, self.error, self.num_writes = set(failing), error, 0

    def write(self, name, files):
        self.num_writes += 1
        if self.num_writes in self.failing:
            files = [
                *files[:-1],
                FullDisk(self.error or OSError(errno.ENOSPC, "No space left on device")),
                files[-1],
            ]
        super().write(name, files)


class FullDisk:
    name = "zz"

    def __init__(self, error):
        self.error = error

    def chunks(self):
        yield memoryview(b"half")
        raise self.error


class GatedStorage(LocalStorage):
    """Writes only once the test opens the gate."""

    def __init__(self, root):
        super().__init__(root)
        self.started, self.gate = threading.Event(), threading.Event()

    def write(self, name, files):
        self.started.set()
        assert self.gate.wait(60)
        super().write(name, files)


class UndeletableStorage(LocalStorage):
    def delete(self, name):
        raise PermissionError(errno.EPERM, "Operation not permitted")


class Record:
    """A writer with everything a test wants to look at afterwards."""

    def __init__(self, storage, strategy=None, first_id=1):
        self.infos, self.sleeps = [], []
        self.store = CheckpointStore(storage.root, storage)
        self.writer = CheckpointWriter(
            self.store,
            strategy or CheckpointStrategy(),
            first_id,
            self.infos.append,
            sleep=self.sleeps.append,
        )

    @property
    def ids(self):
        return [info.id for info in self.store.list()]


@pytest.fixture
def record(tmp_path):
    return Record(LocalStorage(tmp_path))


def test_save_and_commit(record):
    assert record.writer.save({"epoch": 1}, iteration=5) == 1
    assert record.writer.save({"epoch": 2}) == 2
    record.writer.close()
    record.writer.close()
    assert [(info.id, info.iteration) for info in record.infos] == [(1, 5), (2, 0)]
    assert load(record.infos[0].path) == {"epoch": 1}
    with pytest.raises(CheckpointError, match="closed"):
        record.writer.save({})


def test_training_may_change_the_state_right_after(tmp_path):
    storage = GatedStorage(tmp_path)
    record = Record(storage)
    weight = torch.ones(1000)
    record.writer.save({"w": weight})
    assert storage.started.wait(60)
    weight.zero_()
    storage.gate.set()
    record.writer.close()
    assert load(record.infos[0].path)["w"].sum() == 1000


def test_second_save_waits_for_the_first_to_be_written(tmp_path):
    storage = GatedStorage(tmp_path)
    record = Record(storage)
    record.writer.save({"w": torch.zeros(10)})
    assert storage.started.wait(60)
    seen = []

    def save_again():
        record.writer.save({"w": torch.ones(10)})
        seen.extend(record.ids)

    thread = threading.Thread(target=save_again)
    thread.start()
    assert record.ids == []
    storage.gate.set()
    thread.join()
    assert 1 in seen  # committed before the second was even copied
    record.writer.close()
    assert [load(info.path)["w"].sum().item() for info in record.infos] == [0, 10]


def test_directory_is_the_users_again_at_once(tmp_path):
    storage = GatedStorage(tmp_path / "c")
    record = Record(storage)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "a.txt").write_text("kept")
    record.writer.save({"x": 1}, directory=mine)
    (mine / "a.txt").write_text("changed")
    storage.gate.set()
    record.writer.close()
    back = load(record.infos[0].path)
    assert (back.directory / "a.txt").read_text() == "kept"
    assert back == {"x": 1}
    assert os.listdir(tmp_path / "c") == ["checkpoint_000001"]


def test_retention_while_training(tmp_path):
    record = Record(LocalStorage(tmp_path), CheckpointStrategy(1, "loss", "min"))
    for loss in (0.5, 0.1, 0.9, 0.7):
        record.writer.save({"loss": loss})
    record.writer.close()
    assert record.ids == [2, 4]  # the best, and the latest
    assert [info.score for info in record.infos] == [0.5, 0.1, 0.9, 0.7]


def test_nothing_is_written_when_nothing_is_kept(tmp_path):
    record = Record(LocalStorage(tmp_path), CheckpointStrategy(0, "loss"))
    assert record.writer.save({"loss": 1}) == 1
    with pytest.raises(ArgumentError):
        record.writer.save({})
    record.writer.close()
    assert record.infos == []
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("state", "directory", "error"),
    [
        ({"loss": 1, "model": torch.nn.Linear(1, 1)}, None, CheckpointValueError),
        ({"epoch": 1}, None, ArgumentError),
        ({"loss": "low"}, None, ArgumentError),
        ({"loss": 1}, "/no/such/directory", ArgumentError),
        ({"loss": 1}, __file__, ArgumentError),
    ],
)
def test_mistakes_are_raised_where_they_are_made(state, directory, error, tmp_path):
    record = Record(LocalStorage(tmp_path), CheckpointStrategy(None, "loss"))
    with pytest.raises(error):
        record.writer.save(state, directory=directory)
    assert record.writer.save({"loss": 1}) == 1  # no id was used up
    record.writer.close()
    assert record.ids == [1]


def test_write_is_tried_again(tmp_path):
    storage = FaultyStorage(tmp_path, failing={1, 2})
    record = Record(storage)
    record.writer.save({"x": 1})
    record.writer.close()
    assert storage.num_writes == 3
    assert len(record.sleeps) == 2
    assert record.sleeps[0] < record.sleeps[1] <= 1
    assert load(record.infos[0].path) == {"x": 1}


@pytest.mark.parametrize("call", ["save", "flush", "close"])
def test_disk_full_while_saving(call, tmp_path):
    storage = FaultyStorage(tmp_path, failing={2, 3, 4})
    record = Record(storage)
    record.writer.save({"x": 1})
    record.writer.save({"x": 2})
    with pytest.raises(CheckpointWriteError) as caught:
        getattr(record.writer, call)(*([{"x": 3}] if call == "save" else []))
    message = str(caught.value)
    assert record.store.path_of(2) in message
    assert "No space left on device" in message
    assert "after 3 attempts" in message
    assert "Free space there" in message
    assert isinstance(caught.value.__cause__, OSError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == message
    assert os.listdir(tmp_path) == ["checkpoint_000001"]
    assert load(record.store.path_of(1)) == {"x": 1}


def test_writer_goes_on_after_an_error(tmp_path):
    record = Record(FaultyStorage(tmp_path, failing={1, 2, 3}))
    record.writer.save({"x": 1})
    with pytest.raises(CheckpointWriteError):
        record.writer.flush()
    record.writer.flush()
    assert record.writer.save({"x": 2}) == 2
    record.writer.close()
    assert record.ids == [2]


def test_failed_write_with_a_directory_leaves_no_copy(tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "a").touch()
    record = Record(FaultyStorage(tmp_path / "c", failing={1, 2, 3}))
    record.writer.save({}, directory=mine)
    with pytest.raises(CheckpointWriteError):
        record.writer.close()
    assert os.listdir(tmp_path / "c") == []


def test_taken_id_is_not_tried_again(tmp_path):
    Record(LocalStorage(tmp_path)).store.commit(1, snapshot({}))
    record = Record(LocalStorage(tmp_path))
    record.writer.save({"x": "mine"})
    with pytest.raises(CheckpointWriteError, match="exists already"):
        record.writer.close()
    assert record.sleeps == []
    assert load(record.store.path_of(1)) == {}


def test_old_checkpoint_cannot_be_deleted(tmp_path, caplog):
    record = Record(UndeletableStorage(tmp_path), CheckpointStrategy(1))
    record.writer.save({})
    record.writer.save({})
    record.writer.close()
    assert [info.id for info in record.infos] == [1, 2]
    assert "could not be deleted" in caplog.text


def test_callback_that_raises_is_heard(tmp_path):
    def on_commit(info):
        raise RuntimeError("the driver is gone")

    writer = CheckpointWriter(CheckpointStore(tmp_path), CheckpointStrategy(), 1, on_commit)
    writer.save({})
    with pytest.raises(RuntimeError, match="driver is gone"):
        writer.flush()
    writer.close()


def test_ids_continue_after_a_restart(tmp_path):
    first = Record(LocalStorage(tmp_path))
    first.writer.save({})
    first.writer.close()
    second = Record(LocalStorage(tmp_path), first_id=first.store.next_id())
    assert second.writer.save({}) == 2
    second.writer.close()
    assert second.ids == [1, 2]
