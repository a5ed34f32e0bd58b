"""Ctrl-C while a run goes on: whenever it comes, the run ends as it should and can be gone on with."""

import os
import signal
import sys
from contextlib import suppress
from functools import partial

import pytest

import paceline
from paceline import BackendConfig, SGDCallback, Trainer
from paceline.control.termination import Signals
from paceline.testing import ScriptedEngine, reports, returns, saves
from paceline.workers.base import Sent

note = lambda rank: Sent(rank, "note", ("x", {}))  # noqa: E731


def press():
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(autouse=True)
def handlers_are_put_back(pythons_own_handlers):
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "as it was before the run"


def trainer_of(*attempts, logdir="signals", **options):
    return Trainer(backend=BackendConfig(), engine=ScriptedEngine(attempts), logdir=logdir, **options)


class PressAt(SGDCallback):
    def __init__(self, *steps):
        self.steps = steps

    def handle_result(self, results, **info):
        for _ in range(self.steps.count(results[0]["_training_iteration"])):
            press()


def ending_of(trainer):
    run = paceline.load_run(trainer.latest_run_dir)
    return run.status.state, run.status.reason


def test_first_one_lets_the_function_save_and_return():
    trainer = trainer_of([[*reports(2), saves(1, 2), returns("saved")]])
    with pytest.raises(KeyboardInterrupt, match=r"the run was stopped; its folder.*run_001") as caught:
        trainer.run(lambda: None, callbacks=[PressAt(1)])
    assert trainer._crew.group.stop_requested
    assert ending_of(trainer) == ("STOPPED", "interrupted from the keyboard")
    assert trainer.latest_checkpoint == {"step": 2}
    frames = [frame.path.name for frame in caught.traceback]
    assert set(frames) == {"test_signals.py", "trainer.py"}, "none of our internals"


def test_function_does_not_return_in_time():
    trainer = trainer_of([[*reports(1), *[note] * 1000]], preemption_grace_s=0.0)
    with pytest.raises(KeyboardInterrupt):
        trainer.run(lambda: None, callbacks=[PressAt(1)])
    assert ending_of(trainer) == ("STOPPED", "interrupted from the keyboard")


def test_second_one_ends_it_at_once():
    trainer = trainer_of([[*reports(1000), returns()]])
    with pytest.raises(KeyboardInterrupt, match="the run was stopped"):
        trainer.run(lambda: None, callbacks=[PressAt(3, 5)])
    assert trainer._crew.group.num_aborts == 1
    assert ending_of(trainer) == ("STOPPED", "interrupted from the keyboard")
    assert paceline.load_run(trainer.latest_run_dir).metrics["step"].max() == 5


def test_in_the_loop_over_an_iterator_it_is_seen_at_the_next_step():
    trainer = trainer_of([[*reports(1), *[note] * 1000]], preemption_grace_s=0.0)
    iterator = trainer.run_iterator(lambda: None)
    next(iterator)
    press()
    with pytest.raises(KeyboardInterrupt):
        press()  # who insists is heard wherever they are
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    assert ending_of(trainer) == ("STOPPED", "interrupted from the keyboard")


def test_whoever_leaves_the_loop_gets_it_when_the_run_is_closed():
    trainer = trainer_of([[*reports(1), *[note] * 1000]])
    iterator = trainer.run_iterator(lambda: None)
    next(iterator)
    press()
    with pytest.raises(KeyboardInterrupt):
        trainer.shutdown()
    assert ending_of(trainer)[0] == "STOPPED"
    assert trainer._crew.group is None, "the workers are ended all the same"


@pytest.mark.parametrize("times", [1, 2])
def test_too_late_for_the_run_it_is_raised_all_the_same(times):
    """All ranks have returned: there is nothing to stop, and nothing to go on with."""

    class PressAtTheEnd(SGDCallback):
        def finish_training(self, error=False, **info):
            for _ in range(times):
                press()

    trainer = trainer_of([[*reports(1), returns("a")]])
    iterator = trainer.run_iterator(lambda: None, callbacks=[PressAtTheEnd()])
    with pytest.raises(KeyboardInterrupt, match=r"the run had succeeded before; its folder is .*run_\d"):
        iterator.get_final_results(force=True)
    assert ending_of(trainer) == ("SUCCEEDED", None)
    assert iterator.get_final_results() == ["a"]


class Terminates(BackendConfig):
    def join(self, call, *, use_gpu):
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("not at once")


def test_terminated_while_workers_start():
    """There is nothing to save yet, and to start them may take long."""
    before = signal.getsignal(signal.SIGTERM)
    trainer = Trainer(backend=Terminates(), engine=ScriptedEngine([[[returns("a")]]]), logdir="signals")
    with pytest.raises(SystemExit) as caught:
        trainer.run(lambda: None)
    assert caught.value.code == 128 + signal.SIGTERM
    assert ending_of(trainer) == ("STOPPED", "the driver got SIGTERM")
    assert trainer._crew.group is None
    assert signal.getsignal(signal.SIGTERM) == before


def test_terminated_before_workers_start():
    class TerminatesAtTheStart(SGDCallback):
        def start_training(self, logdir, config, **info):
            os.kill(os.getpid(), signal.SIGTERM)

    trainer = trainer_of([[returns("a")]])
    with pytest.raises(SystemExit):
        trainer.run(lambda: None, callbacks=[TerminatesAtTheStart()])
    assert ending_of(trainer) == ("STOPPED", "the driver got SIGTERM")
    assert trainer._crew.group is None, "none was started"


def test_own_handler_of_the_user_stays():
    got = []
    signal.signal(signal.SIGINT, lambda *args: got.append(args))
    try:
        trainer = trainer_of([[*reports(2), returns("a")]])
        assert trainer.run(lambda: None, callbacks=[PressAt(1)]) == ["a"]
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    assert len(got) == 1


def test_one_that_ray_tune_has_left_behind_is_not_the_users():
    from ray.tune.tune import _setup_signal_catching

    former = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGUSR1)}
    asked_for = _setup_signal_catching()
    left = signal.getsignal(signal.SIGINT)
    try:
        trainer = trainer_of([[*reports(2), returns("a")]])
        with pytest.raises(KeyboardInterrupt):
            trainer.run(lambda: None, callbacks=[PressAt(1)])
        assert signal.getsignal(signal.SIGINT) is left, "as it was before the run"
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
    assert ending_of(trainer) == ("STOPPED", "interrupted from the keyboard")
    assert not asked_for.is_set()


def test_in_this_process_the_second_one_interrupts_the_function():
    seen = []

    def train_func():
        press()
        seen.append(paceline.should_stop())
        press()
        seen.append("not reached")

    trainer = Trainer(num_workers=0, backend=BackendConfig(), logdir="signals")
    with pytest.raises(KeyboardInterrupt):
        trainer.run(train_func)
    assert seen == [True]
    assert ending_of(trainer)[0] == "STOPPED"
    trainer.shutdown()


def pressing_at(run, *lines):
    """Ctrl-C at these lines of ours that a call runs through, in this thread; returns how many there are."""
    count = 0
    ours = os.path.dirname(paceline.__file__)

    def trace(frame, event, arg):
        nonlocal count
        if not frame.f_code.co_filename.startswith(ours):
            return None
        if event == "line":
            count += 1
            if count in lines:
                signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("gap", [None, 1, 40], ids=["once", "twice, at once", "twice"])
def test_on_whatever_line_it_comes_the_run_ends_and_says_so(gap):
    """Also between two lines that make the folder and its state."""
    script = [*reports(3), saves(1, 3), *reports(1, start=4), returns("done")]
    num_lines = pressing_at(lambda: trainer_of([script]).run(lambda: None))
    states = []
    for line in range(1, num_lines, max(1, num_lines // 40)):
        trainer = trainer_of([script], [script], logdir=f"signals/{gap}_{line}")
        with suppress(KeyboardInterrupt):
            pressing_at(partial(trainer.run, lambda: None), line, line + (gap or 0))
        states += [run.status.state for run in paceline.list_runs(trainer.logdir)]
        assert set(states) <= {"STOPPED", "SUCCEEDED"}, f"line {line} of {num_lines}"
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert trainer.run(lambda: None) == ["done"], "the Trainer is as good as new"
    assert states.count("STOPPED") > 10


def test_echo_of_a_launcher_is_no_second_signal():
    now = [10.0]
    signals = Signals(lambda: now[0], settle_s=1.0)
    with signals.watching():
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        assert signals.wish.kind == "terminate"
        os.kill(os.getpid(), signal.SIGINT)
        assert not signals.is_urgent()
        now[0] = 12.0
        with pytest.raises(KeyboardInterrupt), signals.raising(1):
            os.kill(os.getpid(), signal.SIGINT)
        signals.release()


def test_one_that_comes_just_before_the_run_is_entered_ends_it(monkeypatch):
    def press_here(iterator):
        raise KeyboardInterrupt

    trainer = trainer_of([[*reports(3), returns("done")]])
    with monkeypatch.context() as patch:
        patch.setattr("paceline.control.iterator.RunIterator.__enter__", press_here)
        with pytest.raises(KeyboardInterrupt):
            trainer.run(lambda: None)
    assert ending_of(trainer)[0] == "STOPPED"
