"""The controller with a clock of the test's own: what takes how long, without waiting for it."""

from contextlib import nullcontext
from functools import partial

import pytest

import paceline
from paceline import BackendConfig, SGDCallback, Trainer
from paceline.control.controller import SAVE_GRACE_S, Controller
from paceline.errors import WorkersLostError
from paceline.testing import ScriptedEngine, reports, returns
from paceline.workers.base import Printed, Sent


class Clock:
    """Stands still, but for `tick_s` whenever somebody looks."""

    def __init__(self, tick_s=0.0):
        self.now, self.tick_s = 0.0, tick_s

    def __call__(self):
        self.now += self.tick_s
        return self.now


@pytest.fixture
def trainer_with(monkeypatch):
    """Makes a Trainer whose workers follow these scripts, and whose controller has this clock."""

    def trainer_with(clock, *scripts, **arguments):
        monkeypatch.setattr("paceline.trainer.Controller", partial(Controller, clock=clock))
        engine = ScriptedEngine([scripts])
        return Trainer(BackendConfig(), num_workers=len(scripts), engine=engine, logdir="clock", **arguments)

    return trainer_with


def note(rank):
    return Sent(rank, "note", ("a_moment", {}))


def saving(rank):
    return Sent(rank, "saving", 1)


def test_time_that_a_callback_takes_is_no_silence_of_the_workers(trainer_with):
    clock = Clock()

    class Slow(SGDCallback):
        def handle_result(self, results, **info):
            clock.now += 3

    script = [*reports(3), returns("a")]
    trainer = trainer_with(clock, script, script, hang_timeout_s=2, max_retries=0)
    assert trainer.run(lambda: None, callbacks=[Slow()]) == ["a", "a"]


@pytest.mark.parametrize(("pauses", "hangs"), [([3, 3, 3], 0), ([3, 5, 3], 1)], ids=["goes on", "stands still"])
def test_slow_write_is_a_hang_only_when_it_stands_still(trainer_with, pauses, hangs):
    clock = Clock()

    def quiet(rank):
        clock.now += 0.1
        return Printed(rank, "")

    def writing(rank):
        return Sent(rank, "writing", None)

    script = [saving, *(line for pause in pauses for line in (*[quiet] * pause, writing)), returns("a")]
    trainer = trainer_with(clock, script, hang_timeout_s=0.35, max_retries=0)
    with pytest.raises(WorkersLostError, match="no progress") if hangs else nullcontext():
        trainer.run(lambda: None)
    events = [event["kind"] for event in paceline.load_run(trainer.latest_run_dir).events]
    assert events.count("hang") == hangs


def test_ranks_that_see_a_stop_at_different_steps_have_time_to_return(trainer_with):
    class Stop(SGDCallback):
        def handle_result(self, results, **info):
            trainer.stop()

    slow = [*reports(2), *[note] * 100, returns("b")]
    trainer = trainer_with(Clock(tick_s=0.01), [*reports(1), returns("a")], slow)
    assert trainer.run(lambda: None, callbacks=[Stop()]) == ["a", "b"]
    assert paceline.load_run(trainer.latest_run_dir).status.state == "STOPPED"


def test_run_that_nobody_looks_at_any_more_does_not_wait_for_its_checkpoint(trainer_with):
    clock = Clock(tick_s=0.01)
    trainer = trainer_with(clock, [saving, *reports(1), *[note] * 5])
    with trainer.run_iterator(lambda: None) as steps:
        next(steps)
        before = clock.now
    assert clock.now - before < SAVE_GRACE_S
    assert paceline.load_run(trainer.latest_run_dir).status.state == "STOPPED"
