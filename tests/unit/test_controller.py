"""The controller against scripted workers: every path through a run, without a process and without a clock."""

import os
from functools import partial

import pytest

import paceline
from paceline import BackendConfig, SGDCallback, Trainer
from paceline.backends.torch import TorchConfig
from paceline.errors import ReportMismatchError, SaveMismatchError, WorkersLostError
from paceline.testing import KnownModel, ScriptedEngine, asks, dies, preempts, raises, reports, returns, saves, unheard
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


def test_the_budget_belongs_to_the_run():
    engine = ScriptedEngine([[[dies()]], [[dies()]], [[returns("a")]], [[dies()]], [[dies()]], [[returns("b")]]])
    trainer = Trainer(backend=BackendConfig(), num_workers=1, engine=engine, max_retries=3, logdir="scripted")
    assert trainer.run(lambda: None) == ["a"]
    trainer.shutdown()
    assert trainer.run(lambda: None) == ["b"], "four restarts in two runs"


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
    with pytest.raises(ReportMismatchError, match=r"rank 0 ended after 1"):
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
        ("WorkersLostError", "Rank 0, through which all ranks are connected, is gone", True),
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


def note(rank):
    return Sent(rank, "note", ("pause", {}))


def test_checkpoint_of_rank_0_alone_waits_for_the_reports_of_the_others():
    """Rank 1 does not save; it has not reported step 2 when it dies, and so the checkpoint of step 2 does not count."""
    _, lines, _ = run(
        [
            [saves(1, 0), *reports(2, x=0), saves(2, 2), *reports(1, start=3, x=0)],
            [*reports(1, x=1), note, note, note, note, dies()],
        ],
        [[*reports(3, x=rank), returns(rank)] for rank in (0, 1)],
    )
    assert lines == ["start", 1, "restart 1", 1, 2, 3, "finish SUCCEEDED False"]
    assert [event["id"] for event in newest_run().events if event["kind"] == "checkpoint"] == [1]
    rows = newest_run().metrics[["step", "rank"]].values.tolist()
    assert rows == [[step, rank] for step in (1, 2, 3) for rank in (0, 1)]


def test_rank_0_alone_reports_and_saves():
    values, lines, _ = run([[note, *reports(2, x=0), saves(1, 2), note, returns("a")], [note] * 3 + [returns("b")]])
    assert values == ["a", "b"]
    assert lines == ["start", 1, 2, "finish SUCCEEDED False"]
    assert [event["id"] for event in newest_run().events if event["kind"] == "checkpoint"] == [1]
    assert newest_run().metrics[["step", "rank"]].values.tolist() == [[1, 0], [2, 0]]


@pytest.mark.parametrize(
    ("end", "error"), [(returns(), ReportMismatchError), (raises(KeyError("lr")), KeyError)], ids=["unequal", "raises"]
)
def test_reports_that_no_other_rank_has_matched_are_kept(end, error):
    with pytest.raises(error):
        run([[*reports(4, x=0), note, note], [*reports(1, x=1), note, note, end]])
    assert newest_run().metrics[["step", "rank"]].values.tolist() == [[1, 0], [1, 1], [2, 0], [3, 0], [4, 0]]


def newest_run():
    return max(paceline.list_runs(), key=lambda one: one.path.stat().st_mtime)


def test_checkpoint_waits_for_a_rank_that_is_behind():
    """Steps 2 and 3 of rank 1 are made, although rank 0 had saved them before rank 1 died."""
    behind = [*reports(1, x=1), saves(1, 1), note, note, note, note, dies()]
    ahead = [line for step in (1, 2, 3) for line in (*reports(1, start=step, x=0), saves(step, step))]
    again = [[*reports(2, start=2, x=rank), returns(rank)] for rank in (0, 1)]
    _, lines, _ = run([ahead, behind], again)
    assert lines == ["start", 1, "restart 1", 2, 3, "finish SUCCEEDED False"]
    run_folder = newest_run()
    assert [event["id"] for event in run_folder.events if event["kind"] == "checkpoint"] == [1]
    assert run_folder.metrics[["step", "rank"]].values.tolist() == [[s, r] for s in (1, 2, 3) for r in (0, 1)]


def test_checkpoint_that_was_sent_when_the_workers_are_ended_counts():
    starts = []

    def resumed(start):
        starts.append(start.iteration)
        return [[returns(1)], [returns(2)]]

    first = [[*reports(1), note, *unheard(saves(1, 1))], [*reports(1), saves(1, 1), dies()]]
    engine = ScriptedEngine([first, resumed], size=2)
    Trainer(backend=BackendConfig(), num_workers=2, engine=engine, logdir="scripted").run(lambda: None)
    assert starts == [1]


def test_ranks_save_unequally():
    with pytest.raises(SaveMismatchError, match=r"rank 1 ended after 1 .*rank 0 has made 2"):
        run([[saves(1, 0), saves(2, 0), returns()], [saves(1, 0), returns()]])


def test_rank_0_alone_does_not_save():
    with pytest.raises(SaveMismatchError, match=r"rank 0 ended after 0 .*rank 1 has made 1"):
        run([[note, returns()], [saves(1, 0), returns()]])


def test_rank_0_alone_saves():
    values, _, _ = run([[*reports(1), saves(1, 1), *reports(1, start=2), returns()], [*reports(2), returns()]])
    assert values == [None, None]
    assert [event["id"] for event in newest_run().events if event["kind"] == "checkpoint"] == [1]


class StopAt(SGDCallback):
    def __init__(self, step):
        self.step = step

    def handle_result(self, results, **info):
        if results[0]["_training_iteration"] == self.step:
            self.trainer.stop()


def stopped(*attempts, at=1, **arguments):
    callback = StopAt(at)
    engine = ScriptedEngine(attempts)
    callback.trainer = Trainer(
        backend=BackendConfig(), num_workers=len(attempts[0]), engine=engine, logdir="scripted", **arguments
    )
    values = callback.trainer.run(lambda: None, callbacks=[callback])
    return values, paceline.load_run(callback.trainer.latest_run_dir).status.state, engine


def test_ranks_that_see_the_stop_at_different_steps_are_stopped():
    values, state, _ = stopped([[*reports(1), saves(1, 1), returns("a")], [*reports(3), returns("b")]])
    assert (values, state) == (["a", "b"], "STOPPED")


def test_stop_then_a_notice_then_the_end_of_the_grace_period():
    values, state, engine = stopped([[*reports(1), returns("a")], [*reports(1), preempts()]], preemption_grace_s=0)
    assert (values, state) == (["a", None], "STOPPED")
    assert engine.groups[0].num_starts == 1, "nothing was started again"


def test_worker_dies_after_a_stop():
    values, state, engine = stopped([[*reports(1), note, note, returns("a")], [*reports(1), note, dies()]])
    assert (values, state) == ([None, None], "STOPPED")
    assert engine.groups[0].num_starts == 1


def answers(engine):
    return [(question.rank, type(answer)) for question, answer in engine.groups[0].answers]


def test_questions_about_storage_are_answered():
    question = asks("storage", ("names", "/not/of/this/run"))
    _, _, engine = run([[*reports(1), question, returns()], [question, *reports(1), returns()]])
    assert sorted(answers(engine)) == [(0, PermissionError), (1, PermissionError)]


def test_checkpoint_that_is_on_its_way_when_the_run_fails_arrives_first():
    saving = lambda rank: Sent(rank, "saving", 1)  # noqa: E731
    question = asks("storage", ("names", "/not/of/this/run"))
    with pytest.raises(KeyError) as caught:
        run([[saving, raises(KeyError("lr")), *[question] * 3, saves(1, 0)]])
    assert answers(caught.value.engine) == [(0, PermissionError)] * 3
    assert caught.value.trainer.latest_checkpoint == {"step": 0}


def test_rank_that_asks_for_what_rank_0_has_still_to_save_is_answered_then():
    _, _, engine = run(
        [[note, note, saves(1, 0), returns()], [saves(1, 0), asks("checkpoint", 1), note, note, returns()]]
    )
    [(question, found)] = engine.groups[0].answers
    assert question.rank == 1
    assert found.path == engine_root() + "/checkpoint_000001"


def engine_root():
    return newest_run().request["checkpoint_root"]


class StopOnRestart(SGDCallback):
    def handle_restart(self, attempt, reason, **info):
        self.trainer.stop()


@pytest.mark.parametrize("attempts", [1, 2], ids=["and no worker can be started", "and workers could be started"])
def test_stop_when_the_function_is_about_to_be_started_again(attempts):
    callback = StopOnRestart()
    engine = ScriptedEngine([[[*reports(1), dies()]]] + [[[returns("again")]]] * (attempts - 1))
    callback.trainer = Trainer(backend=BackendConfig(), num_workers=1, engine=engine, logdir="scripted")
    assert callback.trainer.run(lambda: None, callbacks=[callback]) == [None]
    assert paceline.load_run(callback.trainer.latest_run_dir).status.state == "STOPPED"
    assert engine.groups[0].num_starts == 1


def train_by_script(start, steps, save_every, order, kill=None):
    """Scripts of two ranks without collectives: each reports and saves by itself; `order` is which of them acts next,
    and the victim dies after so many of its lines."""

    def lines(rank):
        for step in range(start.iteration + 1, steps + 1):
            yield from reports(1, start=step, x=step)
            if step % save_every == 0:
                yield saves(start.first_id + (step - start.iteration - 1) // save_every, step, own=order["own"])
        yield returns(rank)

    scripts = {rank: list(lines(rank)) for rank in (0, 1)}
    if kill is not None:
        victim, after = kill
        scripts[victim] = [*scripts[victim][:after], dies()]
        if after >= len(scripts[1 - victim]):
            return [scripts[0], scripts[1]]
    slow = order["slow"]
    scripts[slow] = [line for one in scripts[slow] for line in (*[note] * order["pace"], one)]
    return [scripts[0], scripts[1]]


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("slow", [0, 1])
def test_no_step_of_any_rank_is_missing_whenever_a_rank_is_killed(own, slow):
    """Two ranks that do not meet, one of them slow, and a kill at every point of either."""
    steps, save_every = 6, 2
    for victim in (0, 1):
        for after in range(steps + steps // save_every):
            order = {"own": own, "slow": slow, "pace": 3}
            engine = ScriptedEngine(
                iter(
                    [
                        lambda start, k=(victim, after), o=order: train_by_script(start, steps, save_every, o, k),
                        lambda start, o=order: train_by_script(start, steps, save_every, o),
                    ]
                ),
                size=2,
            )
            trainer = Trainer(backend=BackendConfig(), num_workers=2, engine=engine, logdir="property")
            assert trainer.run(lambda: None) == [0, 1]
            run_folder = paceline.load_run(trainer.latest_run_dir)
            rows = run_folder.metrics[["step", "rank"]].values.tolist()
            assert rows == [[step, rank] for step in range(1, steps + 1) for rank in (0, 1)], (victim, after)
            assert trainer.latest_checkpoint == {"step": steps}
            if own:
                parts = trainer.latest_checkpoint.all_ranks
                assert parts == [{"step": steps, "rank": rank} for rank in (0, 1)]


class BadLogger(SGDCallback):
    """Raises at each result, and at each checkpoint."""

    def handle_result(self, results, **info):
        raise OSError(f"no room for result {results[0]['_training_iteration']}")

    def handle_checkpoint(self, checkpoint, **info):
        raise OSError(f"no room for checkpoint {checkpoint.id}")


def test_callback_raises_again_while_the_attempt_is_released():
    """Once while a checkpoint is waited for, and once in what the workers had sent before they were ended."""
    saving = partial(Sent, kind="saving", value=1)
    script = [saving, *reports(2), saves(1, 1), *unheard(*reports(1, start=3))]
    with pytest.raises(OSError, match="no room for result 1") as caught:
        run([script], callbacks=[BadLogger()])
    [group] = caught.value.engine.groups
    assert group.num_aborts == 1, "the workers do not train on"
    assert any("no room for result 2" in note for note in caught.value.__notes__)
    run_dir = caught.value.trainer.latest_run_dir
    found = paceline.load_run(run_dir)
    assert [info.id for info in found.checkpoints] == [1], "what was saved in time counts"
    assert len(found.metrics) == 3
    assert [name for name in os.listdir(run_dir / "checkpoints") if name.startswith(".")] == []
