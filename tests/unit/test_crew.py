"""The workers between runs and in `execute`: when they serve again, and whose error is told."""

import pytest

from paceline import BackendConfig, Trainer
from paceline.backends.torch import TorchConfig
from paceline.control.crew import JOIN_S, Crew, join_limit
from paceline.errors import WorkersLostError
from paceline.testing import ScriptedEngine, dies, raises, reports, returns
from paceline.workers.base import Resources, Returned, Size


class EchoOfTorch(BackendConfig):
    is_broken_collective = TorchConfig.is_broken_collective


def crew_of(*scripts):
    crew = Crew(ScriptedEngine([scripts]), EchoOfTorch(), Size(len(scripts), len(scripts)), Resources())
    crew.ensure()
    return crew


@pytest.mark.parametrize(("is_intact", "num_starts"), [(True, 1), (False, 2)])
def test_group_that_a_function_has_broken_does_not_serve_the_next_run(is_intact, num_starts):
    engine = ScriptedEngine([[[lambda rank: Returned(rank, ("a", is_intact))]]] * 2)
    trainer = Trainer(BackendConfig(), num_workers=1, engine=engine, logdir="crew")
    for _ in range(2):
        assert trainer.run(lambda: None) == ["a"]
    assert engine.groups[0].num_starts == num_starts


def test_echo_that_arrives_first_is_not_told_for_the_error():
    echo = raises(RuntimeError("[gloo] Connection closed by peer"))
    with pytest.raises(KeyError) as caught:
        crew_of([echo], [raises(KeyError("lr"))]).all(print)
    assert "Connection closed" in caught.value.__notes__[0]


def test_interrupt_during_a_call_ends_it():
    def interrupt(rank):
        raise KeyboardInterrupt

    crew = crew_of([returns("a")], [interrupt])
    with pytest.raises(KeyboardInterrupt):
        crew.all(print)
    assert crew.group.num_aborts == 1, "the workers are not still at it"


def test_worker_that_dies_after_its_answer_has_answered():
    crew = crew_of([returns("a"), dies()], [*reports(1), *reports(1), returns("b")])
    assert [value for value, _ in crew.all(print)] == ["a", "b"]


class Meeting(EchoOfTorch):
    """Joined when every rank has answered once."""

    def join(self, call, *, use_gpu):
        call.all(print)


def test_worker_is_stopped_while_the_group_is_joined():
    stopped, well = [[returns("a")], []], [[returns("a")], [returns("b")]]
    engine = ScriptedEngine([stopped, stopped, well])
    crew = Crew(engine, Meeting(), Size(2, 2), Resources(), max_retries=1)
    with pytest.raises(WorkersLostError, match=r"No answer came in time from rank 1 while the workers joined"):
        crew.ensure(join_s=0.0)
    assert crew.group is None, "it was ended"
    assert crew.get_ready(join_s=0.0) is engine.groups[2], "as after a worker that was killed"


def test_limit_on_silence_leaves_workers_the_time_to_join():
    assert [join_limit(limit) for limit in (None, 0.5, 2 * JOIN_S)] == [None, JOIN_S, 2 * JOIN_S]
