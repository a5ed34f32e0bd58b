"""The driver's end of a driven loop, with workers that play a script."""

import pytest

from paceline.backends.base import BackendConfig
from paceline.control.crew import Crew
from paceline.driven.commands import Command, Line
from paceline.driven.pipeline import Pipeline
from paceline.errors import TrainerStateError, TrainFunctionError, WorkersLostError
from paceline.testing.scripted import ScriptedEngine, dies
from paceline.workers import parcel
from paceline.workers.base import Resources, Returned, Sent, Size


def started(*scripts):
    crew = Crew(ScriptedEngine([scripts]), BackendConfig(), Size(len(scripts), len(scripts)), Resources())
    pipeline = Pipeline(crew, "group", True, lambda raised: False, None)
    pipeline.start()
    return pipeline


def told(**packed):
    values = {int(name.removeprefix("number_")): value for name, value in packed.items()}
    return lambda rank: Returned(rank, values)


def is_busy(rank):
    return Sent(rank, "note", None)


def command(number):
    return Command(number, b"", tells=True, line=Line("loop.py", number))


def test_worker_dies_when_it_has_answered_and_another_is_still_at_it():
    """Its death is told once: who forgets it waits for its next answer for ever."""
    answer = told(number_1=parcel.dumps(1))
    pipeline = started([is_busy, is_busy, is_busy, answer], [answer, dies("was killed")])
    pipeline.send(command(1))
    with pytest.raises(WorkersLostError, match=r"Rank 1 was killed, while the workers did what was sent from loop.py"):
        pipeline.drain()
    with pytest.raises(TrainerStateError, match="has ended, since rank 1 was killed"):
        pipeline.send(command(2))


def test_what_the_driver_cannot_unpack_is_the_error_of_who_asked_for_it():
    """Not of who asked for something else that came with it: that is there."""
    pipeline = started([told(number_1=b"no pickle", number_2=parcel.dumps("here"))])
    for number in (1, 2):
        pipeline.send(command(number))
    with pytest.raises(TrainFunctionError, match="the driver cannot unpickle the value"):
        pipeline.told(1)
    assert pipeline.told(2) == ["here"]


def test_two_at_once_do_not_take_each_others_answers():
    """From another thread, or from the handler of a signal."""
    pipeline = started([told(number_1=parcel.dumps("here"))])
    with pipeline._alone(), pytest.raises(TrainerStateError, match="in the middle of a call"):
        pipeline.send(command(2))
    pipeline.send(command(1))
    assert pipeline.told(1) == ["here"]


@pytest.mark.parametrize("raised", [KeyboardInterrupt, TimeoutError])
def test_ctrl_c_while_something_is_sent(monkeypatch, raised):
    """Or a handler of another signal raises. What was under way is lost: who asked for it would wait for ever."""

    def interrupted(calls):
        raise raised

    pipeline = started([told(number_1=parcel.dumps("here"))])
    monkeypatch.setattr(pipeline._workers, "submit", interrupted)
    with pytest.raises(raised):
        pipeline.send(command(1))
    with pytest.raises(TrainerStateError, match="was interrupted"):
        pipeline.send(command(2))
