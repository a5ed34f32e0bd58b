"""The recorder fed by hand: what counts when, in whatever order things come; and a script that records itself."""

import os
import threading

import pytest

import paceline
from paceline import CheckpointStrategy, SGDCallback, record_run
from paceline.callbacks.dispatch import CallbackList
from paceline.checkpoints.content.files import record_of
from paceline.checkpoints.content.snapshot import rank_dir, snapshot
from paceline.checkpoints.part import Part
from paceline.checkpoints.store import CheckpointStore
from paceline.errors import ArgumentError, TrainerStateError
from paceline.recording.ledger import SILENCE_S
from paceline.recording.recorder import MUTE_S, Recorder
from paceline.runs import RunFolder, RunRequest, checkpoint_root


class Run:
    """A recorder of two ranks, and their hands."""

    def __init__(self, logdir, callbacks=(), strategy=None):
        self.now = 0.0
        request = RunRequest(train_func=print, checkpoint_strategy=strategy or CheckpointStrategy())
        folder = RunFolder.create(logdir)
        root = checkpoint_root(request, folder)
        self.recorder = Recorder(request, folder, CallbackList(callbacks), root, clock=lambda: self.now)
        self.steps = []
        self.recorder.on_step = self.steps.append
        self.recorder.open(2, 2)
        start, _ = self.recorder.begin([1, 2])
        self.store = CheckpointStore(start.root, token=start.token)
        self.counts = [0, 0]

    def report(self, rank, times=1):
        for _ in range(times):
            self.counts[rank] += 1
            self.recorder.take(rank, "report", {"rank": rank, "_training_iteration": self.counts[rank]})

    def save(self, rank, id, own=True):
        files = snapshot({"step": self.counts[0]}).files() if rank == 0 else []
        files += snapshot({"per_rank": {"rank": rank}}).files(rank_dir(rank)) if own else []
        self.store.put(id, files)
        part = Part(id, rank, self.counts[rank], 0.0, tuple(map(record_of, files)))
        self.recorder.take(rank, "part", part)

    @property
    def latest(self):
        latest = self.recorder.saved.latest
        return None if latest is None else (latest.id, latest.ranks)

    def events(self, kind):
        self.recorder.folder.flush()
        events = paceline.load_run(self.recorder.folder.path).events
        return [event for event in events if event["kind"] == kind]


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path / "runs")
    yield run
    run.recorder.close("STOPPED", None, None)


def test_save_that_its_own_later_reports_have_overtaken_is_waited_for(run):
    """On its way to the driver, a save may come one round after reports that were made after it."""
    run.report(0)
    run.save(0, 1)
    run.report(1, times=5)  # it has saved after the first of these
    run.recorder.tick()
    assert run.latest is None
    run.report(0, times=4)
    run.save(0, 2)
    assert run.latest is None, "not even when something else is told first in the next round"
    run.counts[1] = 1
    run.save(1, 1)
    assert run.latest == (1, (0, 1))


def test_reports_of_rank_0_wait_for_a_slow_rank_but_not_for_a_mute_one(run, caplog):
    run.report(0, times=3)
    run.recorder.tick()
    run.now = 0.99 * MUTE_S
    run.recorder.tick()
    assert run.steps == []
    run.now = MUTE_S
    run.recorder.tick()
    assert [[report["rank"] for report in step] for step in run.steps] == [[0], [0], [0]]
    assert "nothing came from rank 1: steps are shown without" in caplog.text
    run.report(0)
    assert len(run.steps) == 4
    assert caplog.text.count("nothing came from") == 1


def test_late_reports_are_in_the_folder_beside_those_of_the_others(run):
    run.report(0, times=2)
    run.recorder.tick()
    run.now = MUTE_S
    run.recorder.tick()
    run.report(1, times=3)
    run.report(0)
    assert [[report["rank"] for report in step] for step in run.steps] == [[0], [0], [0, 1]]
    run.recorder.folder.flush()
    rows = paceline.load_run(run.recorder.folder.path).metrics[["step", "rank"]].values.tolist()
    assert rows == [[step, rank] for step in (1, 2, 3) for rank in (0, 1)]


def test_rank_that_neither_saves_nor_reports_holds_checkpoints_up_for_a_minute(run):
    run.report(0)
    run.save(0, 1, own=False)
    run.now = SILENCE_S - 1
    run.recorder.tick()
    assert run.latest is None
    run.now = SILENCE_S
    run.recorder.tick()
    assert run.latest == (1, (0,))
    run.recorder.settle()
    start, _ = run.recorder.begin([1, 2])
    run.store = CheckpointStore(start.root, token=start.token)
    run.report(0)
    run.save(0, 2, own=False)
    assert run.latest == (2, (0,)), "and not again after a restart"


def test_rank_that_does_not_save_is_known_two_rounds_later(run):
    run.report(0)
    run.save(0, 1)
    run.report(1, times=3)
    run.recorder.tick()
    assert run.latest is None
    run.recorder.tick()
    assert run.latest == (1, (0,))


def test_part_that_comes_too_late_is_left_out_and_told(run, caplog):
    test_rank_that_does_not_save_is_known_two_rounds_later(run)
    run.save(1, 1)
    assert [(event["id"], event["rank"]) for event in run.events("late_part")] == [(1, 1)]
    assert "after it was committed without it" in caplog.text
    run.recorder.tick()
    assert not list(run.recorder.folder.checkpoints_dir.glob(".check*")), "nor is it left on the disk"


def test_checkpoint_waits_for_the_reports_of_a_rank_that_reports_after_saving(run):
    run.report(0)
    run.save(0, 1)
    run.save(1, 1)
    assert run.latest is None
    run.report(1)
    run.recorder.tick()
    assert run.latest == (1, (0, 1))


def test_checkpoints_that_are_merely_unread_are_not_given_up(run):
    for id in range(1, 21):
        run.report(0)
        run.save(0, id)
    for id in range(1, 21):
        run.report(1)
        run.save(1, id)
    run.recorder.tick()
    assert run.latest == (20, (0, 1))
    assert len(run.events("checkpoint")) == 20


def test_failed_part_leaves_nothing_on_the_disk(run):
    run.save(1, 1)
    run.recorder.take(0, "save_failed", (1, "no space"))
    assert not list(run.recorder.folder.checkpoints_dir.glob(".check*"))


def test_what_was_begun_is_dropped_with_its_attempt(run):
    run.report(0)
    run.save(0, 1)
    run.recorder.settle()
    assert not list(run.recorder.folder.checkpoints_dir.glob(".check*"))


class OneAtATime(SGDCallback):
    def __init__(self):
        self.turn, self.collisions, self.checkpoints = threading.Lock(), 0, 0

    def handle_result(self, results, **info):
        self.collide()

    def handle_checkpoint(self, checkpoint, **info):
        self.checkpoints += 1
        self.collide()

    def collide(self):
        if not self.turn.acquire(blocking=False):
            self.collisions += 1
            return
        for _ in range(1000):
            pass
        self.turn.release()


def test_recorded_script_calls_back_one_at_a_time():
    listener = OneAtATime()
    with record_run(callbacks=[listener], logdir="recorded"):
        for step in range(200):
            paceline.report(step=step)
            paceline.save_checkpoint(step=step)
    assert (listener.collisions, listener.checkpoints) == (0, 200)


def test_recorded_script_is_no_worker_and_is_not_recorded_twice(monkeypatch):
    monkeypatch.setenv("SGD_RESULT_ENABLE_DETAILED_AUTOFILLED_METRICS", "1")
    with record_run(logdir="recorded") as run_dir:
        assert not paceline.in_worker()
        paceline.report(x=1)
        with pytest.raises(TrainerStateError, match="recorded already"), record_run():
            pass
    assert "_hostname" in paceline.load_run(run_dir).metrics


def test_fork_of_a_recorded_script_leaves_the_run_alone():
    child = -1
    try:
        with record_run(logdir="recorded") as run_dir:
            child = os.fork()
            if child == 0:
                raise SystemExit
            os.waitpid(child, 0)
            assert paceline.load_run(run_dir).status.state == "RUNNING"
            paceline.report(x=1)
    finally:
        if child == 0:
            os._exit(0)
    run = paceline.load_run(run_dir)
    assert (run.status.state, len(run.metrics)) == ("SUCCEEDED", 1)


def test_ranks_that_cannot_find_each_other_are_told_so(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with pytest.raises(ArgumentError, match="MASTER_PORT not set"), record_run(logdir="nowhere"):
        pass
    assert not [run for run in paceline.list_runs() if "nowhere" in str(run.path)]


def test_what_was_begun_behind_a_url_is_dropped_at_the_end(tmp_path):
    run = Run(tmp_path / "runs", strategy=CheckpointStrategy(storage_path="memory://begun"))
    for id, ranks in ((1, (0, 1)), (2, (0,))):
        for rank in ranks:
            run.save(rank, id)
    assert run.store.storage.names() == ["checkpoint_000001", "checkpoint_000002"]
    run.recorder.settle()
    assert run.store.storage.names() == ["checkpoint_000001"]
    run.recorder.close("STOPPED", None, None)


def test_steps_before_a_checkpoint_are_on_disk_before_it_counts(tmp_path):
    class Look(SGDCallback):
        def handle_checkpoint(self, checkpoint, **info):
            self.seen = paceline.load_run(run.recorder.folder.path).metrics["_training_iteration"].tolist()

    look = Look()
    run = Run(tmp_path / "runs", [look])
    for rank in (0, 1):
        run.report(rank)
    for rank in (0, 1):
        run.save(rank, 1)
    run.recorder.close("STOPPED", None, None)
    assert look.seen == [1, 1]


def test_callback_cannot_change_the_steps_of_an_iterator(tmp_path):
    class Careless(SGDCallback):
        def handle_result(self, results, **info):
            results[0]["rank"] = "changed"

    run, steps = Run(tmp_path / "runs", [Careless()]), []
    run.recorder.on_step = steps.append
    for rank in (0, 1):
        run.report(rank)
    run.recorder.close("STOPPED", None, None)
    assert [report["rank"] for report in steps[0]] == [0, 1]


def test_rank_that_had_something_of_its_own_before_a_restart_is_missed_after_it(run):
    """Rank 1 is lost before it can save again: what it had of its own must not be left behind."""
    for rank in (0, 1):
        run.report(rank)
        run.save(rank, 1, own=rank == 1)
    run.recorder.settle()
    start, _ = run.recorder.begin([3, 4])
    run.store = CheckpointStore(start.root, token=start.token)
    for rank in (0, 1):
        run.report(rank)
    run.save(0, 2, own=False)
    run.recorder.settle()
    assert run.latest == (1, (0, 1))


class Reader(SGDCallback):
    """Reads each checkpoint that it is told about; raises at one of them."""

    def __init__(self, raises_at=None):
        self.seen, self.raises_at = [], raises_at

    def handle_checkpoint(self, checkpoint, **info):
        self.seen.append(paceline.read_checkpoint(checkpoint.path)["step"])
        if checkpoint.id == self.raises_at:
            raise ValueError("the reader is full")


def save_three_at_once(run):
    run.report(0, times=3)
    for id in (1, 2, 3):
        run.save(0, id, own=False)
    run.recorder.end(1)
    run.recorder.tick()


def test_callbacks_can_read_each_of_several_checkpoints_before_old_ones_are_deleted(tmp_path):
    reader = Reader()
    run = Run(tmp_path / "runs", [reader], CheckpointStrategy(num_to_keep=1))
    save_three_at_once(run)
    assert reader.seen == [3, 3, 3]
    assert [info.id for info in run.store.list()] == [3]
    run.recorder.close("STOPPED", None, None)


def test_callback_raises_at_the_first_of_several_checkpoints(tmp_path):
    reader = Reader(raises_at=1)
    run = Run(tmp_path / "runs", [reader], CheckpointStrategy(num_to_keep=1))
    with pytest.raises(ValueError, match="the reader is full"):
        save_three_at_once(run)
    assert reader.seen == [3, 3, 3]
    assert [event["id"] for event in run.events("checkpoint")] == [1, 2, 3]
    assert [info.id for info in run.store.list()] == [3]
    run.recorder.close("STOPPED", None, None)


def test_callback_raises_when_the_last_checkpoint_is_committed_at_the_end(tmp_path):
    run = Run(tmp_path / "runs", [Reader(raises_at=2)])
    for rank in (0, 1):
        run.report(rank)
        run.save(rank, 1, own=False)
    for rank in (0, 1):
        run.report(rank)
    run.save(0, 2, own=False)
    run.report(0)
    run.store.put(3, snapshot({}).files())
    run.recorder.take(0, "saving", 3)
    with pytest.raises(ValueError, match="the reader is full"):
        run.recorder.settle()
    assert [name for name in os.listdir(run.store.root) if name.endswith(".draft")] == []
    run.recorder.folder.flush()
    steps = paceline.load_run(run.recorder.folder.path).metrics.step
    assert list(steps) == [1, 1, 2, 2, 3], "and what no other rank has matched is kept"
    run.recorder.close("STOPPED", None, None)
