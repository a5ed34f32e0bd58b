"""A script that uses `core` in one process."""

import os
import signal
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import paceline
from paceline import core
from paceline.core.host import Host, Nobody
from paceline.core.shards import merge_metadata, owners_of
from paceline.errors import (
    ArgumentError,
    ArgumentTypeError,
    CheckpointError,
    CheckpointNotFoundError,
    TrainerStateError,
)
from paceline.testing.worker import RecordingWire, make_session
from paceline.workers.base import Place


@pytest.fixture
def context():
    with core.init(config={"lr": 0.1}, logdir="core") as context:
        yield context


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model" / "deep").mkdir(parents=True)
    (tmp_path / "model" / "weights").write_text("w")
    (tmp_path / "model" / "deep" / "more").write_text("m")
    return tmp_path / "model"


def files_in(path):
    return {str(one.relative_to(path)): one.read_text() for one in path.rglob("*") if one.is_file()}


def test_a_script_of_core_alone_is_a_run_like_any_other(folder):
    with core.init(config={"lr": 0.1}, logdir="core") as context:
        context.train.report_training_metrics(10, {"loss": 0.5})
        context.train.report_validation_metrics(10, {"loss": 0.4})
        context.train.report_metrics("test", 10, {"loss": 0.3})
        context.train.set_status("nearly done")
        context.train.report_early_exit(core.EarlyExitReason.INVALID_HP)
        id = context.checkpoint.upload(folder, {"steps_completed": 10})
        assert paceline.load_checkpoint()["steps_completed"] == 10
    run = paceline.load_run(context.run_dir)
    assert (run.status.state, run.config, [info.path for info in run.checkpoints]) == (
        "SUCCEEDED",
        {"lr": 0.1},
        [str(run.path / "checkpoints" / id)],
    )
    last = run.metrics.iloc[-1]
    assert run.metrics["steps_completed"].tolist() == [10] * 3
    assert (run.metrics["loss"][0], run.metrics["validation/loss"][1], last["test/loss"]) == (0.5, 0.4, 0.3)
    assert [
        (e["kind"], e.get("text"), e.get("reason")) for e in run.events if e["kind"] in ("status", "early_exit")
    ] == [
        ("status", "nearly done", None),
        ("early_exit", None, "INVALID_HP"),
    ]


@pytest.mark.parametrize(
    ("group", "steps", "metrics", "error"),
    [
        ("a.b", 1, {}, ArgumentError),
        ("", 1, {}, ArgumentError),
        ("a", -1, {}, ArgumentError),
        ("a", 1.0, {}, ArgumentError),
        ("a", 1, [("loss", 1)], ArgumentTypeError),
        ("training", 1, {"steps_completed": 3}, ArgumentError),
    ],
)
def test_reports_that_cannot_be(context, group, steps, metrics, error):
    with pytest.raises(error):
        context.train.report_metrics(group, steps, metrics)


def test_a_metric_is_reported_once_for_each_step(context):
    context.train.report_training_metrics(1, {"loss": 1})
    context.train.report_training_metrics(1, {"accuracy": 1})
    context.train.report_validation_metrics(1, {"loss": 1})
    with pytest.raises(ArgumentError, match="loss of this step was reported before"):
        context.train.report_training_metrics(1, {"loss": 2, "new": 1})
    context.train.report_training_metrics(2, {"loss": 1})


@pytest.mark.parametrize("progress", [-0.1, 1.1, float("nan"), "half", True])
def test_progress_is_a_share(context, progress):
    with pytest.raises(ValueError, match="from 0 to 1"):
        context.train.report_progress(progress)
    context.train.report_progress(1)


def test_checkpoint_there_and_back(context, folder, tmp_path):
    checkpoint = context.checkpoint
    id = checkpoint.upload(folder, {"steps_completed": 3, "nested": {"a": [1]}}, selector=lambda name: "/" in name)
    assert checkpoint.get_metadata(id) == {"steps_completed": 3, "nested": {"a": [1]}}
    with checkpoint.restore_path(id) as path:
        assert files_in(path) == {"deep/more": "m"}
    for _ in range(2):
        checkpoint.download(id, tmp_path / "new" / "place")
        assert files_in(tmp_path / "new" / "place") == {"deep/more": "m"}
    with checkpoint.restore_path(id, selector=lambda name: False) as path:
        assert files_in(path) == {}


def test_download_does_not_touch_what_another_rank_is_reading(context, folder, tmp_path):
    id = context.checkpoint.upload(folder)
    context.checkpoint.download(id, tmp_path / "both")
    with open(tmp_path / "both" / "weights") as file:
        context.checkpoint.download(id, tmp_path / "both")
        assert os.fstat(file.fileno()).st_ino != (tmp_path / "both" / "weights").stat().st_ino
        assert file.read() == "w"
    assert (tmp_path / "both" / "weights").stat().st_mode == (folder / "weights").stat().st_mode


def test_arguments_that_the_run_around_does_not_use_are_named(context, caplog):
    with core.init(checkpoint={"a": 1}, logdir="not used"):
        assert paceline.load_checkpoint() is None
    assert "core.init(logdir=..., checkpoint=...) is not used" in caplog.text


def test_store_path_is_a_checkpoint_at_the_end_of_its_block(context):
    with context.checkpoint.store_path({"a": 1}) as (path, id):
        (path / "weights").write_text("w")
    with context.checkpoint.restore_path(id) as path:
        assert files_in(path) == {"weights": "w"}
    with pytest.raises(KeyError), context.checkpoint.store_path() as (path, _):
        raise KeyError
    assert not path.exists()
    with pytest.raises(CheckpointError, match="Something else was saved"), context.checkpoint.store_path():
        paceline.save_checkpoint(a=1)


def test_nothing_but_metadata(context, tmp_path):
    (tmp_path / "empty").mkdir()
    id = context.checkpoint.upload(tmp_path / "empty", {"a": 1})
    with context.checkpoint.restore_path(id) as path:
        assert files_in(path) == {}


def test_another_run_s_checkpoint_is_found_by_its_path_and_not_deleted(context, folder, tmp_path):
    id = context.checkpoint.upload(folder)
    path = str(context.run_dir / "checkpoints" / id)
    assert context.checkpoint.get_metadata(path) == {}
    with paceline.Trainer(num_workers=0, backend=paceline.BackendConfig(), logdir=tmp_path / "other") as trainer:
        [found] = trainer.run(lambda: use_another(path))
    assert found == {"weights": "w", "deep/more": "m"}
    context.checkpoint.delete(path)
    assert not os.path.exists(path)


def use_another(path):
    with core.init(callbacks=[]) as inside:
        assert (inside.run_dir.parent.name, inside.distributed.size) == ("other", 1)
        with pytest.raises(CheckpointNotFoundError, match="no checkpoint of this run"):
            inside.checkpoint.delete(path)
        mine = inside.checkpoint.upload(path + "/files", {"steps_completed": 1})
        assert paceline.load_checkpoint()["steps_completed"] == 1
        inside.checkpoint.delete(mine)
        with inside.checkpoint.restore_path(path) as there:
            return files_in(there)


@pytest.mark.parametrize("id", ["..", "../checkpoint_000001", "checkpoints/../checkpoint_000001", "a\0b", ""])
def test_ids_that_lead_elsewhere(context, id):
    for act in (context.checkpoint.delete, context.checkpoint.get_metadata):
        with pytest.raises(ArgumentError, match="no id of a checkpoint"):
            act(id)


def test_ids_that_are_not_there(context, folder, tmp_path):
    with pytest.raises(CheckpointNotFoundError):
        context.checkpoint.delete("checkpoint_000009")
    with pytest.raises(CheckpointNotFoundError):
        context.checkpoint.get_metadata("latest")
    link = context.run_dir / "checkpoints" / "checkpoint_000007"
    id = context.checkpoint.upload(folder)
    link.symlink_to(context.run_dir / "checkpoints" / id)
    for act in (context.checkpoint.delete, context.checkpoint.get_metadata):
        with pytest.raises(CheckpointNotFoundError, match="is a link"):
            act("checkpoint_000007")
    link.unlink()


def test_latest_checkpoint_is_deleted(context, folder):
    first, second = context.checkpoint.upload(folder, {"n": 1}), context.checkpoint.upload(folder, {"n": 2})
    context.checkpoint.delete(second)
    assert paceline.load_checkpoint() == {"n": 1}
    assert context.checkpoint.upload(folder, {"n": 3}) == "checkpoint_000003"
    for id in (first, "checkpoint_000003"):
        context.checkpoint.delete(id)
    with pytest.raises(CheckpointNotFoundError, match="was deleted"):
        paceline.load_checkpoint()


@pytest.mark.parametrize("directory", ["nowhere", None])
def test_directories_that_cannot_be_uploaded(context, directory):
    with pytest.raises(ArgumentError):
        context.checkpoint.upload(directory)


def test_storage_is_given_once(tmp_path, folder):
    strategy = paceline.CheckpointStrategy(storage_path=str(tmp_path))
    with (
        pytest.raises(ArgumentError, match="Give one"),
        core.init(checkpoint_storage="a", checkpoint_strategy=strategy),
    ):
        pass
    with core.init(checkpoint_storage=tmp_path / "kept", logdir="core") as context:
        context.checkpoint.upload(folder)
    assert paceline.load_run(context.run_dir).checkpoints[0].path.startswith(str(tmp_path / "kept"))


def test_score_is_a_number_of_the_metadata(folder):
    strategy = paceline.CheckpointStrategy(
        num_to_keep=1, checkpoint_score_attribute="loss", checkpoint_score_order="min"
    )
    with core.init(checkpoint_strategy=strategy, logdir="core") as context:
        for loss in (0.1, 0.5, 0.4):
            context.checkpoint.upload(folder, {"loss": loss})
    assert [info.score for info in paceline.load_run(context.run_dir).checkpoints] == [0.1, 0.4]


# --- asked to end -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", list(core.PreemptMode))
def test_sigterm_preempts(mode):
    def train():
        with core.init(logdir="core", preempt_mode=mode) as context:
            assert not context.preempt.should_preempt()
            os.kill(os.getpid(), signal.SIGTERM)
            assert context.preempt.should_preempt()
            paceline.save_checkpoint(a=1)

    with pytest.raises(SystemExit) as ended:
        train()
    assert ended.value.code == 143
    run = paceline.load_run("core")
    assert (run.status.state, len(run.checkpoints)) == ("STOPPED", 1)


def test_who_may_ask_and_whom():
    class Asked(RecordingWire):
        def ask(self, topic, value, timeout_s=None):
            raise AssertionError("nobody else is needed")

    place = Place(world_rank=1, world_size=2)
    session = make_session(place, wire := Asked(place))
    with pytest.raises(TrainerStateError, match="ask on the chief alone"):
        core.PreemptContext(session, core.PreemptMode.ChiefOnly).should_preempt()
    wire.stopping = True
    assert core.PreemptContext(session, core.PreemptMode.WorkersAskMaster).should_preempt()
    with pytest.raises(AssertionError):
        core.PreemptContext(session, core.PreemptMode.WorkersAskChief).should_preempt()


@pytest.mark.parametrize(("is_acknowledged", "state"), [(False, "SUCCEEDED"), (True, "STOPPED")])
def test_what_is_not_acknowledged_has_not_stopped(is_acknowledged, state):
    def train():
        with core.init(logdir="core") as context:
            context.preempt.should_preempt()
            os.kill(os.getpid(), signal.SIGINT)
            assert context.preempt.should_preempt(auto_ack=False)
            if is_acknowledged:
                context.preempt.acknowledge_preemption_signal()

    with pytest.raises(KeyboardInterrupt):
        train()
    assert paceline.load_run("core").status.state == state


def test_second_interrupt_ends_a_script_at_once():
    reached = []

    def train():
        with core.init(logdir="core") as context:
            context.preempt.should_preempt()
            for times in (1, 2):
                os.kill(os.getpid(), signal.SIGINT)
                reached.append(times)

    with pytest.raises(KeyboardInterrupt):
        train()
    assert reached == [1]
    assert paceline.load_run("core").status.state == "STOPPED"


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_script_that_does_not_look_is_ended_by_the_first_signal(number, error):
    reached = []

    def train():
        with paceline.record_run(logdir="core"):
            paceline.report(a=1)
            os.kill(os.getpid(), number)
            reached.append(1)

    with pytest.raises(error):
        train()
    assert reached == []
    assert paceline.load_run("core").status.state == "STOPPED"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize(("failure", "state"), [(None, "SUCCEEDED"), (KeyError("lr"), "FAILED")])
def test_signal_while_the_run_is_being_closed_is_kept_until_it_is(failure, state):
    """As it comes from launchers, when a rank has failed."""
    reached = []

    class Slow(paceline.Callback):
        def finish_training(self, error=False, **info):
            os.kill(os.getpid(), signal.SIGTERM)
            reached.append(error)

    def train():
        with core.init(logdir="core", callbacks=[Slow()]):
            if failure is not None:
                raise failure

    with pytest.raises(SystemExit if failure is None else KeyError):
        train()
    assert reached == [failure is not None]
    assert paceline.load_run("core").status.state == state


@pytest.mark.parametrize(("code", "state"), [(0, "SUCCEEDED"), (None, "SUCCEEDED"), (3, "FAILED")])
def test_script_that_exits(code, state):
    def train():
        with core.init(logdir="core"):
            paceline.save_checkpoint(a=1)
            sys.exit(code)

    with pytest.raises(SystemExit) as ended:
        train()
    run = paceline.load_run("core")
    assert (ended.value.code, run.status.state, len(run.checkpoints)) == (code, state, 1)


def test_callback_that_exits_while_others_are_listened_to_fails_the_run():
    """In a thread of ours, where sys.exit() would be the end of that thread and nobody would hear of it."""
    host = Host(SimpleNamespace(tick=lambda: sys.exit(3)), 2, Nobody())
    host.tick()
    with pytest.raises(SystemExit):
        host.wait_for_others(0)


def test_unknown_mode_is_refused():
    with pytest.raises(ArgumentError, match="WorkersAskChief"), core.init(preempt_mode="Nobody"):
        pass


# --- shards -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "said"), [("searcher", "report_progress"), ("profiler", "profile"), ("x", "no 'x'")])
def test_what_the_context_does_not_have(context, name, said):
    with pytest.raises(AttributeError, match=said):
        getattr(context, name)
    assert not hasattr(context, name)


def test_numbers_of_a_rank_by_method():
    six = dict(rank=3, size=8, local_rank=1, local_size=2, cross_rank=1, cross_size=4)
    ranks = core.DistributedContext(**six, chief_ip="10.0.0.1", chief_port=1)
    asked = (ranks.get_rank(), ranks.get_size(), ranks.get_local_rank(), ranks.get_local_size(), ranks.get_num_agents())
    assert asked == (3, 8, 1, 2, 4)


def test_no_master_has_started_the_script(context):
    assert paceline.get_cluster_info() is None


def test_lowest_rank_gives_what_several_have():
    assert owners_of([{"a": "1"}, {"a": "1", "b": "2"}, {"b": "2", "c/d": "3"}]) == {"a": 0, "b": 1, "c/d": 2}


@pytest.mark.parametrize(
    ("listings", "words"),
    [
        ([{"a": "1"}, {}, {"a": "2"}], "'a' of ranks 0, 2 differs"),
        ([{"a": "1"}, {"a/b/c": "2"}], "'a' is a file on rank 0 and a folder on rank 1"),
        ([{"a/b": "1"}, {"a": "2"}], "'a' is a file on rank 1 and a folder on rank 0"),
    ],
)
def test_files_that_do_not_fit_together(listings, words):
    with pytest.raises(CheckpointError, match=words):
        owners_of(listings)


def test_metadata_is_merged_level_by_level():
    given = [{"steps_completed": 3, "a": {"x": 1, "z": {}}}, None, {"steps_completed": 3, "a": {"y": 2, "z": {"w": 1}}}]
    assert merge_metadata(given) == {"steps_completed": 3, "a": {"x": 1, "y": 2, "z": {"w": 1}}}
    assert given[0] == {"steps_completed": 3, "a": {"x": 1, "z": {}}}
    same = [{"loss": float("nan"), "weights": np.arange(3)} for _ in range(2)]
    assert merge_metadata(same).keys() == {"loss", "weights"}
    with pytest.raises(CheckpointError, match="'weights'"):
        merge_metadata([*same, {"weights": np.arange(4)}])
    for different in ({"a": {"x": 2}}, {"a": 1}, {"a": {"x": True}}):
        with pytest.raises(CheckpointError, match="on rank 1"):
            merge_metadata([{"a": {"x": 1}}, different])
