"""A rank's background writer: what blocks, what fails when, what is left on disk. Faults are values handed in."""

import errno
import itertools
import os
import pickle
import threading

import pytest
import torch

from paceline.checkpoints import CheckpointStore, load, snapshot
from paceline.checkpoints.content.files import CHUNK_BYTES
from paceline.checkpoints.part import Part
from paceline.checkpoints.storage.local import LocalStorage
from paceline.checkpoints.writer import Content, PartWriter
from paceline.errors import ArgumentError, CheckpointError, CheckpointValueError, CheckpointWriteError


class FaultyStorage(LocalStorage):
    """Fails the given calls of `put` (counted from 1) as a full disk does: in the middle."""

    def __init__(self, root, failing=(), error=None):
        super().__init__(root)
        self.failing, self.error, self.num_puts = set(failing), error, 0

    def put(self, draft, files):
        self.num_puts += 1
        if self.num_puts in self.failing:
            files = [*files, FullDisk(self.error or OSError(errno.ENOSPC, "No space left on device"))]
        super().put(draft, files)


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

    def put(self, draft, files):
        self.started.set()
        assert self.gate.wait(60)
        super().put(draft, files)


class StuckDisk(LocalStorage):
    """Takes one chunk, then none until the test opens the gate."""

    def __init__(self, root):
        super().__init__(root)
        self.stuck, self.gate = threading.Event(), threading.Event()

    def put(self, draft, files):
        super().put(draft, [Interrupted(file, self._wait) for file in files])

    def _wait(self):
        self.stuck.set()
        assert self.gate.wait(60)


class Interrupted:
    def __init__(self, file, wait):
        self.name, self._file, self._wait = file.name, file, wait

    def chunks(self):
        for number, chunk in enumerate(self._file.chunks()):
            if number == 1:
                self._wait()
            yield chunk


class FullForCopies(LocalStorage):
    """Has no room for a copy of the user's directory."""

    def workspace(self):
        raise OSError(errno.ENOSPC, "No space left on device")


class Record:
    """A writer with everything a test wants to look at afterwards."""

    def __init__(self, storage, rank=0, token=None):
        self.parts, self.failures, self.sleeps = [], [], []
        self.store = CheckpointStore(storage.root, storage, token)
        self.writer = PartWriter(
            self.store,
            rank,
            self.parts.append,
            on_failure=lambda id, reason: self.failures.append((id, reason)),
            sleep=self.sleeps.append,
        )

    def save(self, id, state, **content):
        self.writer.save(id, Content(state, **content))

    def commit_all(self):
        """What the driver does with the parts of an only rank."""
        return [load(self.store.commit([part], world_size=1).path) for part in self.parts]

    @property
    def ids(self):
        return [part.id for part in self.parts]


@pytest.fixture
def record(tmp_path):
    return Record(LocalStorage(tmp_path))


@pytest.fixture
def mine(tmp_path):
    """A user's own directory."""
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "a.txt").write_text("kept")
    return mine


def test_part_is_told_once_it_is_durable(record, tmp_path):
    record.writer.save(1, Content({"epoch": 1}), iteration=5, score=0.5)
    record.save(2, {"epoch": 2})
    record.writer.close()
    record.writer.close()
    assert [(part.id, part.rank, part.iteration, part.score) for part in record.parts] == [
        (1, 0, 5, 0.5),
        (2, 0, 0, None),
    ]
    assert record.store.list() == [], "it is the driver who commits"
    assert record.commit_all() == [{"epoch": 1}, {"epoch": 2}]
    assert sorted(os.listdir(tmp_path)) == ["checkpoint_000001", "checkpoint_000002"]
    with pytest.raises(CheckpointError, match="closed"):
        record.save(3, {})


def test_files_of_a_rank_are_in_a_folder_of_its_own(tmp_path):
    first, second = Record(LocalStorage(tmp_path)), Record(LocalStorage(tmp_path), rank=12)
    first.writer.save(1, Content({"w": torch.ones(3)}, own={"per_rank": 0}))
    second.writer.save(1, Content(own={"per_rank": torch.ones(2)}))
    for record in (first, second):
        record.writer.close()
    [part], [other] = first.parts, second.parts
    assert [file.name for file in part.files] == ["state.json", "arrays.safetensors", "ranks/0/state.json"]
    assert [file.name for file in other.files] == ["ranks/12/state.json", "ranks/12/arrays.safetensors"]
    assert (part.has_own, other.has_own) == (True, True)


def test_shared_state_alone_is_nothing_of_a_ranks_own(record):
    record.save(1, {"x": 1})
    record.writer.close()
    assert not record.parts[0].has_own


def test_part_without_content_is_told_at_once(tmp_path):
    record = Record(LocalStorage(tmp_path / "root"), rank=1)
    record.writer.save(7, Content(), iteration=3)
    [part] = record.parts
    assert (part.id, part.rank, part.iteration, part.files) == (7, 1, 3, ())
    assert not (tmp_path / "root").exists()


def test_part_without_content_waits_for_the_one_before(tmp_path):
    storage = GatedStorage(tmp_path)
    record = Record(storage, rank=1)
    record.writer.save(1, Content(own={"x": 1}))
    assert storage.started.wait(60)
    thread = threading.Thread(target=record.writer.save, args=(2, Content()))
    thread.start()
    assert record.ids == []
    storage.gate.set()
    thread.join()
    assert record.ids == [1, 2]


def test_training_may_change_the_state_right_after(tmp_path):
    storage = GatedStorage(tmp_path)
    record = Record(storage)
    weight, own = torch.ones(1000), torch.ones(10)
    record.writer.save(1, Content({"w": weight}, own={"per_rank": own}))
    assert storage.started.wait(60)
    weight.zero_()
    own.zero_()
    storage.gate.set()
    record.writer.close()
    [checkpoint] = record.commit_all()
    assert checkpoint["w"].sum() == 1000
    assert checkpoint.all_ranks[0].sum() == 10


def test_second_save_waits_for_the_first_to_be_written(tmp_path):
    storage = GatedStorage(tmp_path)
    record = Record(storage)
    record.save(1, {"w": torch.zeros(10)})
    assert storage.started.wait(60)
    seen = []

    def save_again():
        record.save(2, {"w": torch.ones(10)})
        seen.extend(record.ids)

    thread = threading.Thread(target=save_again)
    thread.start()
    assert record.ids == []
    storage.gate.set()
    thread.join()
    assert 1 in seen  # durable before the second was even copied
    record.writer.close()
    assert [checkpoint["w"].sum().item() for checkpoint in record.commit_all()] == [0, 10]


def test_directory_is_the_users_again_at_once(tmp_path, mine):
    storage = GatedStorage(tmp_path / "c")
    record = Record(storage)
    record.save(1, {"x": 1}, directory=mine)
    (mine / "a.txt").write_text("changed")
    storage.gate.set()
    record.writer.close()
    [back] = record.commit_all()
    assert (back.directory / "a.txt").read_text() == "kept"
    assert back == {"x": 1}
    assert os.listdir(tmp_path / "c") == ["checkpoint_000001"]


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (Content({"loss": 1, "model": torch.nn.Linear(1, 1)}), CheckpointValueError),
        (Content({"loss": 1}, own={"per_rank": object()}), CheckpointValueError),
        (Content({"loss": 1}, "/no/such/directory"), ArgumentError),
        (Content({"loss": 1}, __file__), ArgumentError),
    ],
)
def test_mistakes_are_raised_where_they_are_made(content, error, tmp_path):
    record = Record(LocalStorage(tmp_path))
    with pytest.raises(error):
        record.writer.save(1, content)
    assert (record.parts, record.failures) == ([], [])
    record.save(1, {"loss": 1})
    record.writer.close()
    assert record.ids == [1]


def test_write_is_tried_again(tmp_path):
    storage = FaultyStorage(tmp_path, failing={1, 2})
    record = Record(storage)
    record.save(1, {"x": 1})
    record.writer.close()
    assert storage.num_puts == 3
    assert len(record.sleeps) == 2
    assert record.sleeps[0] < record.sleeps[1] <= 1
    assert record.failures == []
    assert record.commit_all() == [{"x": 1}]


@pytest.mark.parametrize("call", ["save", "flush", "close"])
def test_disk_full_while_saving(call, tmp_path):
    storage = FaultyStorage(tmp_path, failing={2, 3, 4})
    record = Record(storage)
    record.save(1, {"x": 1})
    record.save(2, {"x": 2})
    if call == "save":
        error = record.writer.save(3, Content({"x": 3}))  # which goes on all the same
        record.writer.close()
    else:
        with pytest.raises(CheckpointWriteError) as caught:
            getattr(record.writer, call)()
        error = caught.value
    message = str(error)
    assert record.store.path_of(2) in message
    assert "No space left on device" in message
    assert "after 3 attempts" in message
    assert "Free space there" in message
    assert isinstance(error.__cause__, OSError)
    assert str(pickle.loads(pickle.dumps(error))) == message
    assert record.failures == [(2, message)]
    assert record.commit_all() == [{"x": 1}] + [{"x": 3}] * (call == "save")
    record.store.discard(2)  # as the driver does, once a later one is complete
    assert sorted(os.listdir(tmp_path)) == ["checkpoint_000001"] + ["checkpoint_000003"] * (call == "save")


def test_disk_full_in_one_rank_leaves_the_parts_of_others(tmp_path):
    first = Record(LocalStorage(tmp_path), token="same")
    second = Record(FaultyStorage(tmp_path, failing={1, 2, 3}), rank=1, token="same")
    first.save(1, {"x": 1})
    first.writer.close()
    second.writer.save(1, Content(own={"y": 1}))
    with pytest.raises(CheckpointWriteError):
        second.writer.close()
    assert first.commit_all() == [{"x": 1}]
    files = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(files) == ["checkpoint_000001/checkpoint.json", "checkpoint_000001/state.json"]


def test_writer_goes_on_after_an_error(tmp_path):
    record = Record(FaultyStorage(tmp_path, failing={1, 2, 3}))
    record.save(1, {"x": 1})
    with pytest.raises(CheckpointWriteError):
        record.writer.flush()
    record.writer.flush()
    record.save(2, {"x": 2})
    record.writer.close()
    assert record.ids == [2]


def test_failed_write_with_a_directory_leaves_no_copy(tmp_path, mine):
    record = Record(FaultyStorage(tmp_path / "c", failing={1, 2, 3}))
    record.save(1, {}, directory=mine)
    with pytest.raises(CheckpointWriteError):
        record.writer.close()
    assert [path for path in (tmp_path / "c").rglob("*") if path.is_file()] == []
    record.store.discard(1)
    assert os.listdir(tmp_path / "c") == []


def test_disk_full_while_the_directory_is_copied(tmp_path, mine):
    record = Record(FullForCopies(tmp_path / "c"))
    with pytest.raises(CheckpointWriteError, match=r"after 1 attempt: .*No space left"):
        record.save(1, {}, directory=mine)
    record.save(1, {"x": 1})
    record.writer.close()
    assert record.commit_all() == [{"x": 1}]


def test_taken_id_is_not_tried_again(tmp_path):
    url = f"memory://{tmp_path.name}"
    CheckpointStore(url).write(1, snapshot({}))
    record = Record(CheckpointStore(url).storage)
    record.save(1, {"x": "mine"})
    with pytest.raises(CheckpointWriteError, match="exists already: another run uses this folder"):
        record.writer.close()
    assert record.sleeps == []
    assert [id for id, _ in record.failures] == [1]
    assert load(record.store.path_of(1)) == {}


def test_listener_that_raises_is_heard(tmp_path):
    def on_part(part):
        raise RuntimeError("the driver is gone")

    writer = PartWriter(CheckpointStore(tmp_path), 0, on_part)
    writer.save(1, Content({}))
    with pytest.raises(RuntimeError, match="driver is gone"):
        writer.flush()
    writer.close()


def test_directory_that_is_none_is_told_before_the_one_before_is_written(tmp_path):
    storage = GatedStorage(tmp_path / "root")
    record = Record(storage)
    record.writer.save(1, Content({"x": 1}))
    assert storage.started.wait(60)
    with pytest.raises(ArgumentError, match="no_such"):
        record.writer.save(2, Content({"x": 2}, directory=tmp_path / "no_such"))
    assert record.ids == []
    storage.gate.set()
    record.writer.close()


def test_large_write_is_told_while_its_bytes_move_and_not_while_they_do_not(tmp_path):
    now, told = [0.0], []

    def clock():
        now[0] += 1.0
        return now[0]

    storage = StuckDisk(tmp_path / "c")
    store = CheckpointStore(storage.root, storage)
    writer = PartWriter(store, 0, lambda part: None, on_progress=lambda: told.append(now[0]), clock=clock)
    writer.save(1, Content({"much": bytes(5 * CHUNK_BYTES)}))
    assert storage.stuck.wait(60)
    num_told = len(told)
    assert num_told >= 5, "the checksum"
    storage.gate.set()
    writer.close()
    assert len(told) >= num_told + 4


def test_write_that_does_not_take_long_is_not_told_on_the_way(tmp_path):
    storage = LocalStorage(tmp_path / "c")
    told = []
    writer = PartWriter(
        CheckpointStore(storage.root, storage), 0, told.append, on_progress=lambda: told.append(1), clock=lambda: 0.0
    )
    writer.save(1, Content({"much": bytes(3 * CHUNK_BYTES)}))
    writer.close()
    assert [type(one) for one in told] == [Part]


def test_files_of_a_directory_that_are_linked_are_told_one_by_one(tmp_path):
    folder, told = tmp_path / "mine", []
    folder.mkdir()
    for name in "abc":
        (folder / name).touch()  # nothing to read: what is told is that they are synced
    storage, ticks = LocalStorage(tmp_path / "c"), itertools.count()
    store = CheckpointStore(storage.root, storage)
    writer = PartWriter(store, 0, lambda part: None, on_progress=lambda: told.append(1), clock=lambda: next(ticks))
    writer.save(1, Content({}, directory=folder))
    writer.close()
    assert len(told) == 3 + 2, "and the state: its checksum, and the state itself"
