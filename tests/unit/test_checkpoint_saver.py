"""What saving and loading mean on each rank, and what the driver hears of it."""

import errno
import os
import shutil
import threading
from pathlib import Path

import pytest

from paceline.checkpoints import Checkpoint, CheckpointStore, CheckpointStrategy, load, snapshot
from paceline.checkpoints.content.files import CHUNK_BYTES
from paceline.checkpoints.part import CommittedFound, DraftFound, Part
from paceline.checkpoints.reading import load_through
from paceline.checkpoints.saver import Saver, Start
from paceline.checkpoints.storage.landmark import open_in_worker
from paceline.checkpoints.storage.local import LocalStorage
from paceline.errors import (
    ArgumentError,
    CheckpointDamagedError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointValueError,
    CheckpointWriteError,
)
from paceline.recording.ledger import Cut
from paceline.recording.saved import Saved
from paceline.runs import RunRequest
from paceline.testing import as_worker


@pytest.fixture
def folder(tmp_path):
    """A user's own directory."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "notes.txt").write_text("kept")
    return folder


def save_everywhere(savers, step, own=None):
    for rank, saver in enumerate(savers):
        saver.save({"step": step}, None, own and own(rank), step)


def loaded(saver):
    checkpoint, _ = saver.load()
    return checkpoint


class Undeletable(LocalStorage):
    def delete(self, name):
        raise PermissionError(errno.EPERM, "Operation not permitted")


class Unwritable(LocalStorage):
    """Refuses one rank's files for good."""

    def __init__(self, root, rank):
        super().__init__(root)
        self._folder_of_rank = f"ranks/{rank}/"

    def put(self, draft, files):
        if any(file.name.startswith(self._folder_of_rank) for file in files):
            raise FileExistsError(errno.EEXIST, "There is something")
        super().put(draft, files)


class LostAnswer(LocalStorage):
    """The first commit works, and the driver does not hear of it."""

    num_commits = 0

    def commit(self, draft, manifest, files):
        super().commit(draft, manifest, files)
        self.num_commits += 1
        if self.num_commits == 1:
            raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")


def test_all_ranks_load_what_rank_0_saved(driver):
    driver = driver(2)
    savers = [driver.saver(rank) for rank in range(2)]
    assert [saver.load() for saver in savers] == [(None, True)] * 2
    savers[0].save({"step": 1}, None, None, 1)
    savers[1].save({"step": -1}, None, None, 1)
    assert [saver.load() for saver in savers] == [({"step": 1}, False)] * 2
    assert [(info.id, info.iteration, info.world_size) for info in driver.infos] == [(1, 1, 2)]


def test_before_the_first_save_all_load_what_the_run_started_from(driver, tmp_path):
    path = CheckpointStore(tmp_path / "former").write(1, snapshot({"step": 5})).path
    for given in (path, {"step": 5}):
        run = driver(2, checkpoint=given)
        assert [run.saver(rank).load() for rank in range(2)] == [({"step": 5}, True)] * 2


def test_each_rank_gets_its_own_back(driver):
    first = driver(2)
    savers = [first.saver(rank) for rank in range(2)]
    save_everywhere(savers, 3, own=lambda rank: {"per_rank": {"rank": rank}})
    for saver in savers:
        saver.close()
    assert [loaded(saver).per_rank for saver in savers] == [{"rank": 0}, {"rank": 1}]
    assert (load(first.infos[0].path).per_rank, first.infos[0].iteration) == (None, 3)
    assert load(first.infos[0].path).all_ranks == [{"rank": 0}, {"rank": 1}]
    first.begin()
    again = [loaded(first.saver(rank)) for rank in range(2)]
    assert again == [{"step": 3}] * 2
    assert [checkpoint.per_rank for checkpoint in again] == [{"rank": 0}, {"rank": 1}]


def test_number_of_workers_has_changed(driver):
    before = driver(2)
    save_everywhere(
        savers := [before.saver(rank) for rank in range(2)], 1, own=lambda rank: {"per_rank": {"rank": rank}}
    )
    for saver in savers:
        saver.close()
    after = driver(3, checkpoint=before.infos[0].path)
    for rank in range(3):
        checkpoint = loaded(after.saver(rank))
        assert (checkpoint, checkpoint.per_rank) == ({"step": 1}, None)
        assert checkpoint.all_ranks == [{"rank": 0}, {"rank": 1}]


def test_draft_is_loaded_as_long_as_a_rank_is_missing(driver, folder):
    driver = driver(2)
    savers = [driver.saver(rank) for rank in range(2)]
    savers[0].save({"step": 1}, folder, {"per_rank": {"rank": 0}}, 1)
    draft = loaded(savers[0])
    assert isinstance(driver.find(0, 1), DraftFound)
    assert driver.infos == []
    assert (draft, draft.per_rank) == ({"step": 1}, {"rank": 0})
    savers[1].save({}, None, {"per_rank": {"rank": 1}}, 1)
    savers[1].close()
    assert isinstance(driver.find(0, 1), CommittedFound)
    assert (draft.directory / "notes.txt").read_text() == "kept", "also after the commit"
    committed = loaded(savers[0])
    assert (committed, committed.per_rank) == ({"step": 1}, {"rank": 0})
    assert (committed.directory / "notes.txt").read_text() == "kept"
    savers[0].abandon()  # the function has ended; its process has not, and may end without any exit handler
    assert [name for name in os.listdir(driver.saved.root) if name.startswith(".paceline-staging")] == []
    assert (committed.directory / "notes.txt").read_text() == "kept"


def test_what_all_ranks_gave_is_that_of_the_whole_checkpoint(driver, monkeypatch):
    driver = driver(3)
    savers = [driver.saver(rank) for rank in range(3)]
    savers[0].save({"step": 1}, None, {"per_rank": {"rank": 0}}, 1)
    draft = loaded(savers[0])
    monkeypatch.setattr("paceline.checkpoints.saver.LOAD_TIMEOUT_S", 0.0)
    with pytest.raises(CheckpointNotFoundError, match=r"checkpoint_000001 is not complete.*on all ranks"):
        draft.all_ranks  # noqa: B018
    savers[1].save({}, None, None, 1)
    savers[2].save({}, None, {"per_rank": {"rank": 2}}, 1)
    for saver in savers:
        saver.close()
    assert draft.all_ranks == [{"rank": 0}, None, {"rank": 2}]


def test_draft_is_committed_while_it_is_being_loaded(driver):
    driver = driver(2)
    second = driver.saver(1)

    class CommittedMeanwhile(LocalStorage):
        def fetch(self, source, files):
            if not driver.infos:
                second.save({}, None, None, 1)
            return super().fetch(source, files)

    first = driver.saver(0, CommittedMeanwhile)
    first.save({"step": 1}, None, None, 1)
    assert first.load() == ({"step": 1}, False)
    assert [info.id for info in driver.infos] == [1]


def test_damaged_draft_is_not_loaded(driver):
    driver = driver(2)
    saver = driver.saver()
    saver.save({"step": 1}, None, None, 1)
    saver.close()
    [path] = Path(driver.saved.root).glob(".*/state.json")
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(CheckpointDamagedError, match=r"state\.json"):
        saver.load()


def test_checkpoint_that_other_ranks_resume_from_is_not_pruned(driver):
    driver = driver(checkpoint_strategy=CheckpointStrategy(num_to_keep=1))
    saver = driver.saver()
    saver.save({"step": 1}, None, None, 1)
    saver.close()
    driver.begin()
    late, again = driver.saver(), driver.saver()
    for step in (2, 3):
        again.save({"step": step}, None, None, step)
    again.close()
    assert [info.id for info in CheckpointStore(driver.saved.root).list()] == [1, 3]
    assert late.load() == ({"step": 1}, True)
    driver.saved.close()
    assert [info.id for info in CheckpointStore(driver.saved.root).list()] == [3], "it is spared while the run lasts"


def test_rank_takes_a_newer_one_when_its_own_is_pruned(driver):
    driver = driver(2, checkpoint_strategy=CheckpointStrategy(num_to_keep=1))
    first, second, third = driver.saver(0), driver.saver(1), driver.saver(1)
    third.save({}, None, None, 1)
    for step in (1, 2, 3):
        first.save({"step": step}, None, None, step)
        second.save({}, None, None, step)
    first.close()
    assert third.load() == ({"step": 3}, False)


def test_retention_while_training(driver):
    driver = driver(checkpoint_strategy=CheckpointStrategy(1, "loss", "min"))
    saver = driver.saver()
    for loss in (0.5, 0.1, 0.9, 0.7):
        saver.save({"loss": loss}, None, None, 1)
    saver.close()
    assert [info.id for info in CheckpointStore(driver.saved.root).list()] == [2, 4]  # the best, and the latest
    assert [info.score for info in driver.infos] == [0.5, 0.1, 0.9, 0.7]


def test_old_checkpoint_cannot_be_deleted(driver, caplog):
    driver = driver(checkpoint_strategy=CheckpointStrategy(1))
    driver.saved._storage = Undeletable(driver.saved.root)
    driver.begin()
    saver = driver.saver()
    for step in (1, 2):
        saver.save({}, None, None, step)
    saver.close()
    assert [info.id for info in driver.infos] == [1, 2]
    assert "could not be deleted" in caplog.text


def test_commit_works_and_its_answer_is_lost(driver):
    driver = driver()
    driver.saved._storage = LostAnswer(driver.saved.root)
    driver.begin()
    saver = driver.saver()
    saver.save({"step": 1}, None, None, 1)
    saver.close()
    assert [(info.id, load(info.path)) for info in driver.infos] == [(1, {"step": 1})]


def test_another_run_uses_the_folder(driver):
    driver = driver()
    saver = driver.saver()
    CheckpointStore(driver.saved.root).write(1, snapshot({"whose": "another's"}))
    saver.save({"step": 1}, None, None, 1)
    with pytest.raises(CheckpointWriteError, match=r"another run uses this folder"):
        saver.close()
    assert load(CheckpointStore(driver.saved.root).path_of(1)) == {"whose": "another's"}


def test_another_run_has_saved_at_the_same_moment(driver):
    driver = driver()
    theirs = CheckpointStore(driver.saved.root).write(1, snapshot({"whose": "another's"}), saved_at=5.0)
    with pytest.raises(CheckpointWriteError, match=r"another run uses this folder"):
        driver.saved.commit(Cut(1, (Part(1, 0, 0, theirs.time),)))


def test_resumed_run_leaves_what_was_in_its_folder_before_it_began(tmp_path):
    request = RunRequest(train_func=print, first_checkpoint_id=4)
    store = CheckpointStore(tmp_path)
    store.write(3, snapshot({"whose": "another's"}))
    start, _ = Saved(request, str(tmp_path), is_resumed=True).begin(1)
    assert (start.checkpoint, start.first_id) == (None, 4)
    mine = store.write(4, snapshot({"whose": "mine"}))
    start, _ = Saved(request, str(tmp_path), is_resumed=True).begin(1)
    assert (start.checkpoint, start.first_id) == (mine.path, 5)


def test_ids_continue_in_the_next_attempt_and_what_was_drafted_is_gone(driver):
    driver = driver(2)
    save_everywhere(savers := [driver.saver(rank) for rank in range(2)], 1)
    savers[0].save({"step": 2}, None, None, 2)  # rank 1 dies before it has
    savers[0].close()
    root = driver.saved.root
    assert len(os.listdir(root)) == 3, "a checkpoint, a draft and the driver's token"
    driver.begin()
    assert sorted(os.listdir(root)) == [".paceline-driver", "checkpoint_000001"]
    save_everywhere(savers := [driver.saver(rank) for rank in range(2)], 3)
    savers[0].close()
    assert [info.id for info in driver.infos] == [1, 2]
    assert load(driver.infos[1].path) == {"step": 3}


def test_writer_of_an_attempt_that_is_over_disturbs_nobody(driver):
    driver = driver(2)
    root, former = driver.saved.root, driver.start
    driver.begin()
    assert driver.start.first_id == former.first_id, "nobody has seen a draft of it"
    late = CheckpointStore(root, token=former.token)
    late.put(former.first_id, snapshot({"step": -1}).files())
    save_everywhere(savers := [driver.saver(rank) for rank in range(2)], 1)
    savers[0].close()
    late.put(former.first_id, snapshot({"step": -1}).files("ranks/1/"))
    assert [load(info.path) for info in driver.infos] == [{"step": 1}]


def test_rank_0_does_not_save(driver):
    saver = driver(2).saver(1)
    saver.save({}, None, None, 1)
    with pytest.raises(CheckpointNotFoundError, match="equally often on all ranks, or on rank 0 alone"):
        saver.load()


def test_rank_0_could_not_write_what_another_waits_for(driver):
    driver = driver(2)
    second, first = driver.saver(1), driver.saver(0, lambda root: Unwritable(root, 0))
    second.save({}, None, None, 1)
    first.save({"step": 1}, None, {"per_rank": {}}, 1)
    with pytest.raises(CheckpointWriteError):
        first.close()
    with pytest.raises(CheckpointWriteError, match="was not written"):
        second.load()


def test_driver_is_told_when_saving_begins_and_how_it_ends(driver):
    driver = driver(2)
    first, second = driver.saver(0), driver.saver(1)
    first.save({"step": 1}, None, None, 1)
    first.close()
    assert sorted(driver.heard) == [(0, "part"), (0, "saving")]
    driver.heard.clear()
    second.save({"step": 1}, None, None, 1)
    assert driver.heard == [(1, "part")], "it has nothing to write"
    driver.heard.clear()
    second.save({"step": 2}, None, {"per_rank": {}}, 2)
    second.close()
    assert sorted(driver.heard) == [(1, "part"), (1, "saving")]


def test_part_of_one_rank_cannot_be_written(driver):
    driver = driver(2)
    first, second = driver.saver(0), driver.saver(1, lambda root: Unwritable(root, 1))
    own = {"per_rank": {}}
    first.save({"step": 1}, None, own, 1)
    second.save({}, None, own, 1)
    with pytest.raises(CheckpointWriteError, match="exists already"):
        second.close()
    first.close()
    assert sorted(driver.heard) == [(0, "part"), (0, "saving"), (1, "save_failed"), (1, "saving")]
    assert driver.infos == []
    assert not driver.ledger.is_hopeful(), "whichever of the two messages came first"


def test_who_waits_for_a_checkpoint_that_another_rank_could_not_write_is_told_so(driver):
    """Though there is an earlier one, with which a rank that only loads would go on."""
    driver = driver(2)
    savers = first, second = driver.saver(0), driver.saver(1, lambda root: Unwritable(root, 1))
    save_everywhere(savers, 1)
    assert first.wait(1, 5).endswith("checkpoint_000001")
    save_everywhere(savers, 2, own=lambda rank: {"per_rank": {"rank": rank}})
    with pytest.raises(CheckpointWriteError, match="exists already"):
        second.wait(2, 5)
    with pytest.raises(CheckpointWriteError, match="exists already"):
        first.wait(2, 5)
    assert loaded(first)["step"] == 1


@pytest.mark.parametrize(
    ("state", "directory", "error"),
    [
        ({"loss": 1, "model": object()}, None, CheckpointValueError),
        ({"epoch": 1}, None, ArgumentError),
        ({"loss": "low"}, None, ArgumentError),
        ({"loss": 1}, "/no/such/directory", ArgumentError),
        ({"loss": 1}, __file__, ArgumentError),
    ],
)
def test_mistakes_are_raised_where_they_are_made(driver, state, directory, error):
    driver = driver(checkpoint_strategy=CheckpointStrategy(None, "loss"))
    saver = driver.saver()
    with pytest.raises(error):
        saver.save(state, directory, None, 1)
    assert driver.heard == [(0, "save_failed")]
    saver.save({"loss": 1}, None, None, 1)
    saver.close()
    assert [info.id for info in driver.infos] == [2], "the n-th call is number n, on every rank"


def test_nothing_is_written_when_nothing_is_kept(driver, folder, asking):
    driver = driver(2, checkpoint_strategy=CheckpointStrategy(num_to_keep=0))

    def opener(root):
        return open_in_worker(root, driver.landmarks, asking(driver.saved.relay))

    savers = [driver.saver(rank, opener) for rank in range(2)]
    state = {"items": [1]}
    for number in (1, 2):
        savers[0].save(state, folder, {"per_rank": {"rank": 0}}, number)
        state["items"].append(number + 1)
        savers[1].save({}, None, {"per_rank": {"rank": 1}}, number)
    for rank, saver in enumerate(savers):
        saver.close()
        checkpoint = loaded(saver)
        assert (checkpoint, checkpoint.per_rank) == ({"items": [1, 2]}, {"rank": rank})
        assert (checkpoint.directory / "notes.txt").read_text() == "kept"
    assert driver.saved.load_latest() == {"items": [1, 2]}
    assert not os.path.exists(driver.saved.root)
    assert driver.saved._storage.names() == ["checkpoint_000002"], "there is room for one"
    driver.begin()
    assert driver.saver(1, opener).load() == ({"items": [1, 2]}, True)


@pytest.mark.parametrize("root", ["{tmp}/x", "file://{tmp}/x", "relative", "memory://x/y"])
def test_in_memory_every_name_is_only_a_name(driver, asking, tmp_path, monkeypatch, root):
    monkeypatch.chdir(tmp_path)
    run = type(driver(1))(root.format(tmp=tmp_path), checkpoint_strategy=CheckpointStrategy(num_to_keep=0))
    saver = run.saver(0, lambda root: open_in_worker(root, run.landmarks, asking(run.saved.relay)))
    saver.save({"step": 1}, None, None, 1)
    saver.close()
    assert [info.id for info in run.infos] == [1]
    assert run.saved.load(run.infos[0].path) == saver.load()[0] == {"step": 1}
    assert not {"x", "relative", "file:"} & set(os.listdir(tmp_path))


def test_session_without_a_driver_leaves_nothing_on_disk(tmp_path, monkeypatch):
    from paceline import load_checkpoint, save_checkpoint

    monkeypatch.chdir(tmp_path)
    with as_worker():
        save_checkpoint(step=1)
        assert load_checkpoint() == {"step": 1}
    assert os.listdir(tmp_path) == []


def test_abandon_waits_for_the_writing_and_says_nothing(driver):
    driver = driver()
    started, gate = threading.Event(), threading.Event()

    class Gated(LocalStorage):
        def put(self, draft, files):
            started.set()
            assert gate.wait(60)
            raise FileExistsError(errno.EEXIST, "There is something")

    saver = driver.saver(0, Gated)
    saver.save({"step": 1}, None, None, 1)
    assert started.wait(60)
    gate.set()
    saver.abandon()
    assert (0, "save_failed") in driver.heard


def test_checkpoint_that_has_nothing_shared_is_one_all_the_same(driver):
    saver = driver().saver()
    saver.save({}, None, {"per_rank": {"mine": 1}}, 0)
    loaded, _ = saver.load()
    assert loaded
    assert loaded == {}
    assert loaded.per_rank == {"mine": 1}
    assert not Checkpoint()


def test_load_through_reads_a_part_only_for_a_rank(driver, tmp_path):
    driver = driver(1)
    saver = driver.saver()
    saver.save({"step": 1}, None, {"per_rank": {"mine": True}}, 1)
    saver.close()
    path = driver.infos[0].path
    assert load_through(LocalStorage, path).per_rank is None
    assert load_through(LocalStorage, path, rank=0, world_size=1).per_rank == {"mine": True}
    assert load_through(LocalStorage, path, rank=0, world_size=2).per_rank is None


def test_threads_that_save_at_once_save_one_after_the_other(driver):
    driver = driver()
    saver = driver.saver()
    barrier, errors = threading.Barrier(4), []

    def save(number):
        try:
            barrier.wait(60)
            for _ in range(4):
                saver.save({"number": number, "data": bytes([number]) * 5000}, None, None, 0)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=save, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    saver.close()
    assert errors == []
    assert sorted(info.id for info in driver.infos) == list(range(1, 17))
    for info in driver.infos:
        checkpoint = load(info.path)
        assert checkpoint["data"] == bytes([checkpoint["number"]]) * 5000


def test_save_in_the_middle_of_a_save(driver):
    """As a signal handler may do; here, it is a score that does it."""

    class Interrupting:
        shape = ()

        def item(self):
            saver.save({"step": 1}, None, None, 1)

    saver = driver(checkpoint_strategy=CheckpointStrategy(checkpoint_score_attribute="step")).saver()
    with pytest.raises(CheckpointError, match="in the middle of another such call of this thread"):
        saver.save({"step": Interrupting()}, None, None, 1)
    saver.save({"step": 2}, None, None, 2)
    assert loaded(saver) == {"step": 2}


def test_number_of_a_checkpoint_that_was_deleted_is_not_given_again(driver, tmp_path):
    run = driver()
    saver = run.saver()
    saver.save({"step": 1}, None, None, 1)
    saver.close()
    shutil.rmtree(tmp_path / "checkpoints")
    run.begin()
    assert run.start.first_id == 2


def test_what_was_reported_and_saved_is_safe_before_a_rank_waits_for_the_driver(driver):
    saver = driver().saver()
    ears, said = saver._driver, []
    ask, ears.flush = ears.ask, lambda: said.append("flush")
    ears.ask = lambda *args, **kwargs: said.append("ask") or ask(*args, **kwargs)
    saver.save({"step": 1}, None, None, 1)
    assert loaded(saver)["step"] == 1
    assert said == ["flush", "ask"]
    saver.close()


def test_driver_hears_of_a_large_write_while_it_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.checkpoints.writer._TELL_S", 0.0)
    told = []

    class Driver:
        def send(self, kind, value):
            told.append(kind)

    start = Start(None, 0, 1, str(tmp_path / "c"), "token")
    saver = Saver(start, CheckpointStrategy(), 0, 1, Driver(), LocalStorage)
    saver.save({"much": bytes(CHUNK_BYTES)}, None, None, 1)
    saver.close()
    assert told.count("writing") >= 2
    assert [kind for kind in told if kind != "writing"] in (["saving", "part"], ["part", "saving"])
