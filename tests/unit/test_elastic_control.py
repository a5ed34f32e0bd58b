"""The controller when workers are taken away or may be added: scripted workers, no process, no clock."""

import os
import signal

import pytest

import paceline
from paceline import BackendConfig, SGDCallback, Trainer
from paceline.errors import WorkersLostError
from paceline.testing import ScriptedEngine, asks, dies, preempts, raises, reports, returns, saves
from paceline.workers.base import Sent


class Log(SGDCallback):
    def __init__(self):
        self.lines = []

    def start_training(self, logdir, config, **info):
        self.lines.append(("start", info["world_size"]))

    def handle_restart(self, attempt, reason, **info):
        self.lines.append(("restart", attempt, info["cause"]))

    def handle_resize(self, world_size, **info):
        self.lines.append(("resize", info["former"], world_size))

    def finish_training(self, error=False, **info):
        self.lines.append(("finish", info["status"]))


def run(*attempts, engine=None, **arguments):
    log = Log()
    trainer = Trainer(
        backend=BackendConfig(), engine=engine or ScriptedEngine(attempts), logdir="elastic_control", **arguments
    )
    try:
        return trainer.run(lambda: None, callbacks=[log]), log.lines, trainer
    except BaseException as error:
        error.lines, error.trainer = log.lines, trainer
        raise


def note(rank):
    return Sent(rank, "note", ("a_moment", {}))


def leaving(rank):
    """should_stop() is true there."""
    return Sent(rank, "leaving", None)


def events(trainer, *kinds):
    return [event for event in paceline.load_run(trainer.latest_run_dir).events if event["kind"] in kinds]


def test_preempted_worker_is_let_to_return_and_the_run_goes_on():
    values, lines, trainer = run(
        [[*reports(2), preempts(), leaving, returns("early")], [*reports(2), note, leaving, returns("early")]],
        [[returns("a")], [returns("b")]],
        num_workers=2,
        max_retries=0,
    )
    assert values == ["a", "b"], "not what was returned because of the notice"
    assert lines == [("start", 2), ("restart", 1, "preemption"), ("finish", "SUCCEEDED")]
    [notice] = events(trainer, "preempted")
    assert (notice["rank"], notice["reason"]) == (0, "got SIGTERM")


def test_preempted_worker_that_dies_is_no_loss():
    values, lines, _ = run(
        [[preempts(), dies("was killed by SIGKILL")], []],
        [[returns("a")], [returns("b")]],
        num_workers=2,
        max_retries=0,
    )
    assert values == ["a", "b"]
    assert ("restart", 1, "preemption") in lines


def test_another_worker_that_dies_is_a_loss():
    with pytest.raises(WorkersLostError, match="max_retries=0"):
        run([[preempts()], [dies("fell over")]], num_workers=2, max_retries=0)


def test_exception_of_the_function_after_a_notice_is_the_users():
    with pytest.raises(KeyError):
        run([[preempts(), raises(KeyError("lr"))]], num_workers=1)


def test_function_that_does_not_listen_is_ended_after_the_grace_period():
    values, lines, trainer = run([[preempts()], []], [[returns(1)], [returns(2)]], num_workers=2, preemption_grace_s=0)
    assert values == [1, 2]
    assert ("restart", 1, "preemption") in lines
    assert trainer._crew.group.stop_requested, "it was asked first"


def test_preemptions_have_their_own_budget():
    with pytest.raises(WorkersLostError, match="max_preemptions=1"):
        run(*[[[preempts(), leaving, returns()]]] * 2, num_workers=1, max_preemptions=1)


def test_notice_after_the_last_step_is_too_late():
    values, lines, _ = run([[*reports(1), preempts(), returns("a")], [*reports(1), note, returns("b")]], num_workers=2)
    assert (values, lines) == (["a", "b"], [("start", 2), ("finish", "SUCCEEDED")])


def test_group_shrinks_and_everybody_is_told():
    values, lines, trainer = run(
        [[*reports(1), dies()], [*reports(1)], [*reports(1)]],
        [[*reports(1), returns("a")], [*reports(1), returns("b")]],
        num_workers=(2, 3),
    )
    assert values == ["a", "b"]
    assert lines == [
        ("start", 2),
        ("resize", 2, 3),
        ("restart", 1, "loss"),
        ("resize", 3, 2),
        ("finish", "SUCCEEDED"),
    ]
    assert [(e["former"], e["world_size"]) for e in events(trainer, "resize")] == [(2, 3), (3, 2)]
    assert [e["world_size"] for e in events(trainer, "attempt")] == [3, 2]


class RoomySoon(ScriptedEngine):
    """There is room for more as soon as somebody asks."""

    def group(self, size, resources, preload):
        group = super().group(size, resources, preload)
        group.has_room = True
        return group


def test_group_grows_at_a_checkpoint_and_not_before():
    attempts = [
        [[*reports(3), saves(1, 2), *reports(1, start=4)]],
        [[*reports(2, start=3), returns("a")], [*reports(2, start=3), returns("b")]],
    ]
    values, lines, trainer = run(engine=RoomySoon(attempts), num_workers=(1, 2), max_retries=0)
    assert values == ["a", "b"]
    assert lines == [("start", 1), ("restart", 1, "growth"), ("resize", 1, 2), ("finish", "SUCCEEDED")]
    frame = paceline.load_run(trainer.latest_run_dir).metrics
    assert frame[["step", "rank"]].values.tolist() == [[1, 0], [2, 0], [3, 0], [3, 1], [4, 0], [4, 1]]
    assert events(trainer, "attempt")[1]["resumes_from"].endswith("/checkpoint_000001")


def test_group_does_not_grow_when_a_rank_has_already_ended():
    attempts = [[[*reports(1), note, saves(1, 1), returns("a")], [*reports(1), returns("b")]]]
    values, lines, _ = run(engine=RoomySoon(attempts), num_workers=(2, 3))
    assert values == ["a", "b"]
    assert lines == [("start", 2), ("finish", "SUCCEEDED")]


def test_group_at_its_maximum_does_not_ask_for_room():
    attempts = [[[*reports(3), saves(1, 2), *reports(1, start=4), returns("a")]]]
    _, lines, _ = run(engine=RoomySoon(attempts), num_workers=1)
    assert lines == [("start", 1), ("finish", "SUCCEEDED")]


def test_workers_in_step_wait_until_the_next_step_is_wanted():
    engine = ScriptedEngine([[[*reports(1), asks("turn", 1), *reports(1, start=2), asks("turn", 2), returns("a")]]])
    trainer = Trainer(backend=BackendConfig(), engine=engine, num_workers=1, logdir="elastic_control")
    iterator = trainer.run_iterator(lambda: None)
    answers = engine.groups[0].answers
    next(iterator)
    assert answers == []
    next(iterator)
    assert [question.value for question, _ in answers] == [1]
    assert iterator.get_final_results(force=True) == ["a"]
    assert [question.value for question, _ in answers] == [1, 2]


def test_driver_is_terminated_and_the_function_returns_in_time():
    before = signal.getsignal(signal.SIGTERM)
    engine = ScriptedEngine([[[*reports(1), *reports(1, start=2), returns("saved")]]])
    trainer = Trainer(backend=BackendConfig(), engine=engine, num_workers=1, logdir="elastic_control")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        iterator = trainer.run_iterator(lambda: None)
        next(iterator)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(SystemExit) as caught:
            iterator.get_final_results(force=True)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "as it was before the run"
    finally:
        signal.signal(signal.SIGTERM, before)
    assert caught.value.code == 128 + signal.SIGTERM
    assert engine.groups[0].stop_requested
    status = paceline.load_run(trainer.latest_run_dir).status
    assert (status.state, status.reason) == ("STOPPED", "the driver got SIGTERM")


def test_worker_that_dies_while_the_driver_is_being_terminated_is_not_replaced():
    engine = ScriptedEngine([[[*reports(1), *reports(1, start=2), dies()], [*reports(2)]]])
    trainer = Trainer(backend=BackendConfig(), engine=engine, num_workers=2, logdir="elastic_control")
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        iterator = trainer.run_iterator(lambda: None)
        next(iterator)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(SystemExit):
            iterator.get_final_results(force=True)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert engine.groups[0].num_starts == 1
    assert paceline.load_run(trainer.latest_run_dir).status.state == "STOPPED"


def test_users_own_sigterm_handler_stays():
    got = []
    engine = ScriptedEngine([[[*reports(1), *reports(1, start=2), returns("a")]]])
    trainer = Trainer(backend=BackendConfig(), engine=engine, num_workers=1, logdir="elastic_control")
    before = signal.signal(signal.SIGTERM, lambda *args: got.append(args))
    try:
        iterator = trainer.run_iterator(lambda: None)
        next(iterator)
        os.kill(os.getpid(), signal.SIGTERM)
        assert len(got) == 1, "while the run goes on"
        assert iterator.get_final_results(force=True) == ["a"]
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not engine.groups[0].stop_requested
    assert paceline.load_run(trainer.latest_run_dir).status.state == "SUCCEEDED"
