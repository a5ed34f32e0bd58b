"""The controller against scripted workers: every path through a run, without a process and without a clock."""

from pathlib import Path

import pytest

import paceline
from paceline import BackendConfig, SGDCallback, Trainer
from paceline.backends.torch import TorchConfig
from paceline.checkpoints import CheckpointInfo
from paceline.control.gather import Gather
from paceline.errors import ReportMismatchError, WorkersLostError
from paceline.testing import KnownModel, ScriptedEngine, dies, raises, reports, returns
from paceline.testing.scripted import asks
from paceline.workers.base import Raised, Sent


class Log(SGDCallback):
    def __init__(self):
        self.lines = []

    def start_training(self, logdir, config, **info):
        self.lines.append("start")

    def handle_result(self, results, **info):
        self.lines.append(results[0]["_training_iteration"])

    def handle_restart(self, attempt, reason, **info):
        self.lines.append(f"restart {attempt}")

    def finish_training(self, error=False, **info):
        self.lines.append(f"finish {info['status']} {error}")


class EchoOfTorch(BackendConfig):
    is_broken_collective = TorchConfig.is_broken_collective


def run(*attempts, max_retries=3, callbacks=(), backend=None):
    engine = ScriptedEngine(attempts)
    trainer = Trainer(
        backend=backend or BackendConfig(),
        num_workers=len(attempts[0]),
        engine=engine,
        max_retries=max_retries,
        logdir="scripted",
    )
    log = Log()
    try:
        return trainer.run(lambda: None, callbacks=[log, *callbacks]), log.lines, engine
    except Exception as error:
        error.log, error.engine, error.trainer = log.lines, engine, trainer
        raise


def test_undisturbed():
    values, lines, engine = run([[*reports(3), returns("a")], [*reports(3), returns("b")]])
    assert values == ["a", "b"]
    assert lines == ["start", 1, 2, 3, "finish SUCCEEDED False"]
    assert engine.groups[0].healthy(), "the group stays for the next run"


def test_worker_is_killed_and_the_group_is_renewed():
    values, lines, engine = run(
        [[*reports(3), dies()], [*reports(2)]],
        [[*reports(3), returns(1)], [*reports(3), returns(2)]],
    )
    assert values == [1, 2]
    assert lines == ["start", 1, 2, "restart 1", 1, 2, 3, "finish SUCCEEDED False"]
    assert (engine.groups[0].num_starts, engine.groups[0].num_aborts) == (2, 1)
    assert engine.groups[0].healthy()


def test_workers_die_too_often():
    with pytest.raises(WorkersLostError, match="max_retries=1") as caught:
        run([[dies()]], [[dies("fell over")]], max_retries=1)
    assert "fell over" in str(caught.value)
    assert caught.value.log == ["start", "restart 1", "finish FAILED True"]
    assert not caught.value.engine.groups[0].healthy()


def test_user_exception_is_not_retried():
    with pytest.raises(KeyError) as caught:
        run([[*reports(1), raises(KeyError("lr"))], [*reports(1)]])
    assert caught.value.log == ["start", 1, "finish FAILED True"]
    assert caught.value.engine.groups[0].num_starts == 1


def test_echo_of_a_death_that_arrives_first_is_not_taken_for_the_cause():
    echo = raises(RuntimeError("[gloo] Connection closed by peer"))
    values, lines, _ = run(
        [[*reports(1), echo], [*reports(1), *reports(1, start=2), dies()]],
        [[returns(1)], [returns(2)]],
        backend=EchoOfTorch(),
    )
    assert values == [1, 2]
    assert "restart 1" in lines


def test_ranks_report_unequally():
    with pytest.raises(ReportMismatchError, match="rank 0 ended after 1"):
        run([[*reports(1), returns()], [*reports(3), returns()]])


def test_worker_that_dies_after_it_has_returned_does_no_harm():
    values, lines, _ = run(
        [[returns("a"), dies()], [*reports(0), *[lambda r: Sent(r, "note", ("x", {}))] * 3, returns("b")]]
    )
    assert values == ["a", "b"]
    assert "restart 1" not in lines


def test_stop_requested_by_a_callback_reaches_the_group():
    class Stop(SGDCallback):
        def handle_result(self, results, **info):
            trainer.stop()

    engine = ScriptedEngine([[[*reports(1), returns("early")]]])
    trainer = Trainer(backend=BackendConfig(), num_workers=1, engine=engine, logdir="scripted")
    assert trainer.run(lambda: None, callbacks=[Stop()]) == ["early"]
    assert engine.groups[0].stop_requested
    assert paceline.load_run(trainer.latest_run_dir).status.state == "STOPPED"


def test_rank_makes_no_progress():
    engine = ScriptedEngine([[[*reports(1)], [*reports(1)]], [[returns(1)], [returns(2)]]])
    trainer = Trainer(backend=BackendConfig(), num_workers=2, engine=engine, logdir="scripted", hang_timeout_s=1e-9)
    assert trainer.run(lambda: None) == [1, 2]
    run = paceline.load_run(trainer.latest_run_dir)
    assert "hang" in [event["kind"] for event in run.events]
    assert (run.path / "logs" / "stacks_0.txt").exists()


@pytest.mark.parametrize(
    ("type_name", "message", "is_echo"),
    [
        ("DistBackendError", "anything", True),
        ("RuntimeError", "[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]", True),
        ("RuntimeError", "Broken pipe", True),
        ("RuntimeError", "mat1 and mat2 shapes cannot be multiplied", False),
        ("ValueError", "Connection closed by peer", False),
    ],
)
def test_which_exceptions_may_be_the_echo_of_another_rank(type_name, message, is_echo):
    assert TorchConfig().is_broken_collective(Raised(0, type_name, message, "")) is is_echo


def test_known_model_is_what_gradient_descent_does():
    model, weight = KnownModel(), 0.0
    for step in range(20):
        assert (weight - 1.0) ** 2 == model.loss_at(step)
        weight -= model.lr * 2 * (weight - model.target)
        assert weight == model.weight_after(step + 1)


def test_step_that_one_rank_could_not_report_is_kept_when_it_is_not_made_again():
    def committed(rank):
        return Sent(rank, "committed", CheckpointInfo(1, "checkpoint_000001", None, 2, 0.0, 0))

    def pause(rank):
        return Sent(rank, "note", ("pause", {}))

    _, lines, _ = run(
        [[*reports(2, x=0), committed, *reports(1, start=3, x=0)], [*reports(1, x=1), pause, pause, dies()]],
        [[*reports(1, start=3, x=0), returns(1)], [*reports(1, start=3, x=1), returns(2)]],
    )
    assert lines == ["start", 1, "restart 1", 3, "finish SUCCEEDED False"], "callbacks get whole steps only"
    newest = max(paceline.list_runs(), key=lambda one: one.path.stat().st_mtime)
    rows = newest.metrics[["step", "rank", "x"]].values.tolist()
    assert rows == [[1, 0, 0], [1, 1, 1], [2, 0, 0], [3, 0, 0], [3, 1, 1]]


def test_leftovers_are_the_incomplete_steps_by_rank():
    gather = Gather(2)
    for number in range(3):
        gather.add(0, {"n": number})
    gather.add(1, {"n": 10})
    assert gather.leftovers() == [{0: {"n": 1}}, {0: {"n": 2}}]
    assert Gather(2).leftovers() == []


def answers(engine):
    return [(question.rank, type(answer)) for question, answer in engine.groups[0].answers]


def test_questions_about_storage_are_answered():
    question = asks("storage", ("names", "/not/of/this/run"))
    _, _, engine = run([[*reports(1), question, returns()], [question, *reports(1), returns()]])
    assert sorted(answers(engine)) == [(0, PermissionError), (1, PermissionError)]


def test_checkpoint_that_is_on_its_way_when_the_run_fails_arrives_first():
    info = CheckpointInfo(id=1, path="p", score=0.0, iteration=1, time=0.0, num_bytes=1)
    saving = lambda rank: Sent(rank, "saving", None)  # noqa: E731
    question = asks("storage", ("names", "/not/of/this/run"))
    with pytest.raises(KeyError) as caught:
        run([[saving, raises(KeyError("lr")), *[question] * 3, lambda rank: Sent(rank, "committed", info)]])
    assert answers(caught.value.engine) == [(0, PermissionError)] * 3
    assert caught.value.trainer.latest_checkpoint_path == Path("p")
