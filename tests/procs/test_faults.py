"""Workers that die, hang or raise: what the user gets, and what is left."""

import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from fault_ranks import kill_self, leave, segfault, train_with_trouble

import paceline
from paceline import BackendConfig, CheckpointStrategy, SGDCallback, Trainer
from paceline.errors import TrainFunctionError, WorkersLostError


def run_out_of_memory():
    """What the kernel does to a process that takes too much, in a form that does not take it."""
    os.kill(os.getpid(), signal.SIGKILL)


class Restarts(SGDCallback):
    def __init__(self):
        self.reasons, self.steps, self.end = [], [], None

    def handle_restart(self, attempt, reason, **info):
        self.reasons.append((attempt, reason))

    def handle_result(self, results, **info):
        self.steps.append(results[0]["step"])

    def finish_training(self, error=False, **info):
        self.end = (error, info["status"])


@pytest.mark.parametrize(
    ("trouble", "named", "rank"),
    [(kill_self, "SIGKILL", 0), (kill_self, "SIGKILL", 1), (segfault, "SIGSEGV", 1), (leave, "exit code 1", 1)],
    ids=lambda v: getattr(v, "__name__", None),
)
def test_worker_is_lost_and_training_continues_from_the_checkpoint(warm, trouble, named, rank):
    callback = Restarts()
    values = warm.run(train_with_trouble, {"trouble": trouble, "rank": rank}, callbacks=[callback])
    assert values == [30.0, 30.0], "as without trouble"
    [(attempt, reason)] = callback.reasons
    assert attempt == 1
    assert f"rank {rank}" in reason
    assert (named if warm.engine.name == "local" else "was lost") in reason  # Ray does not say how
    assert callback.steps == [1, 2, 3, 4, 5], "resumed where the checkpoint was: no step twice"
    assert callback.end == (False, "SUCCEEDED")
    assert warm.latest_checkpoint == {"step": 5, "total": 30.0}
    run = paceline.load_run(warm.latest_run_dir)
    assert run.metrics["step"].tolist() == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert [event["kind"] for event in run.events].count("restart") == 1
    assert run.metrics["_training_iteration"].tolist() == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5], "numbers go on"
    assert [info.id for info in run.checkpoints] == [1, 2, 3, 4, 5]


def test_ranks_that_wait_for_each_other_in_vain_are_named(warm, monkeypatch, caplog):
    def train_func():
        if paceline.world_rank() == 1:
            while not paceline.should_stop():
                time.sleep(0.01)

    class StopOnceSaid(logging.Handler):
        def emit(self, record):
            if "rank 0 has returned, rank 1 is still in test_faults.py line" in record.getMessage():
                warm.stop()

    monkeypatch.setattr("paceline.control.watch.STANDSTILL_S", 0.2)
    handler = StopOnceSaid()
    logging.getLogger("paceline").addHandler(handler)
    try:
        warm.run(train_func)
    finally:
        logging.getLogger("paceline").removeHandler(handler)
    assert "rank 0 has returned, rank 1 is still in test_faults.py line" in caplog.text
    assert "standstill" in [event["kind"] for event in paceline.load_run(warm.latest_run_dir).events]


def test_worker_that_dies_before_it_is_ready_is_made_again(tmp_path, results_dir):
    def die_twice():
        if paceline.world_rank() == 1 and len(list(tmp_path.iterdir())) < 2:
            (tmp_path / f"{os.getpid()}").touch()
            os._exit(3)

    with Trainer(backend=BackendConfig(), num_workers=2, max_retries=2) as trainer:
        trainer.shutdown()
        trainer.start(initialization_hook=die_twice)
        assert trainer.execute(paceline.world_rank) == [0, 1]
    with Trainer(backend=BackendConfig(), num_workers=1, max_retries=1) as trainer:
        trainer.shutdown()
        with pytest.raises(WorkersLostError, match="exit code 3"):
            trainer.start(initialization_hook=lambda: os._exit(3))


def test_hang_while_the_disk_is_full_is_a_hang(results_dir, tmp_path):
    def hang_once():
        if not (tmp_path / "hung").exists():
            (tmp_path / "hung").touch()
            threading.Event().wait()
        return "done"

    class NoLogs(SGDCallback):
        """What cannot be written, here because the folder is gone."""

        def start_training(self, logdir, config, **info):
            shutil.rmtree(f"{logdir}/logs")

    trainer = Trainer(backend=BackendConfig(), num_workers=1, hang_timeout_s=0.5)
    assert trainer.run(hang_once, callbacks=[NoLogs()]) == ["done"]
    [restart] = [one for one in paceline.load_run(trainer.latest_run_dir).events if one["kind"] == "restart"]
    assert "made no progress" in restart["reason"]
    assert "could not be written" in restart["reason"]
    trainer.shutdown()


def test_function_leaves_by_exit_0(warm):
    def train_func():
        paceline.report(step=1)
        paceline.save_checkpoint(step=1)
        sys.exit()

    assert warm.run(train_func) == [None, None]
    assert warm.latest_checkpoint == {"step": 1}
    assert warm.execute(lambda: sys.exit(0)) == [None, None]


@pytest.mark.parametrize("code", [2, "no such dataset"])
def test_function_gives_up_by_exit(warm, code):
    callback = Restarts()
    message = f"SystemExit: the function ended itself with sys.exit({code!r})"
    with pytest.raises(TrainFunctionError, match=re.escape(message)) as caught:
        warm.run(lambda: sys.exit(code), callbacks=[callback])
    assert "in the training function on rank" in caught.value.__notes__[0]
    assert callback.reasons == [], "it would do so again"
    assert paceline.load_run(warm.latest_run_dir).status.state == "FAILED"


def test_process_that_the_function_forks_does_not_come_back_as_the_worker(warm):
    def train_func():
        codes = []
        for end in (lambda: None, lambda: sys.exit(3), lambda: 1 / 0):
            child = os.fork()
            if child == 0:
                return end()
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        return codes

    assert warm.run(train_func) == [[0, 3, 1]] * 2


def test_worker_is_lost_with_checkpoints_in_memory(warm):
    strategy = CheckpointStrategy(num_to_keep=0)
    values = warm.run(train_with_trouble, {"trouble": kill_self, "rank": 1}, checkpoint_strategy=strategy)
    assert values == [30.0, 30.0]


def test_without_checkpoints_the_function_starts_over_and_later_reports_win(warm, tmp_path):
    def train_func():
        again = (tmp_path / "second").exists()
        torch.distributed.barrier()
        for step in range(3):
            paceline.report(step=step, again=again)
            if step == 1 and not again:
                torch.distributed.barrier()
                (tmp_path / "second").touch()
                kill_self()

    warm.run(train_func)
    run = paceline.load_run(warm.latest_run_dir)
    assert run.metrics.query("rank == 0")["again"].tolist() == [True, True, True]
    if warm.engine.name == "local":
        assert len(run.all_metrics) == len(run.metrics) + 4, "what a killed worker had reported is not lost"


def test_retries_are_used_up(results_dir):
    with Trainer(num_workers=2, max_retries=2) as trainer:
        callback = Restarts()
        with pytest.raises(paceline.PacelineError, match=r"max_retries=2.*exit code 9") as caught:
            trainer.run(lambda: os._exit(9), callbacks=[callback])
        assert "restart" in str(caught.value)
        assert len(callback.reasons) == 2
        assert callback.end == (True, "FAILED")
        assert paceline.load_run(trainer.latest_run_dir).status.state == "FAILED"
        assert trainer.run(paceline.world_rank) == [0, 1], "the Trainer is usable"


class CustomError(Exception):
    def __init__(self, code, detail):
        super().__init__(code, detail)
        self.code, self.detail = code, detail


@pytest.mark.parametrize("rank", [0, 1])
def test_user_exception_is_raised_with_its_own_type_and_is_not_masked(warm, rank):
    def train_func():
        paceline.report(x=1)
        if paceline.world_rank() == rank:
            raise CustomError(42, "the data is bad")
        torch.distributed.barrier()  # the other rank waits for one that never comes

    callback = Restarts()
    callback.handle_result = lambda results, **info: None
    with pytest.raises(CustomError) as caught:
        warm.run(train_func, callbacks=[callback])
    assert (caught.value.code, caught.value.detail) == (42, "the data is bad")
    notes = "\n".join(caught.value.__notes__)
    assert f"rank {rank}" in notes
    assert 'raise CustomError(42, "the data is bad")' in notes
    assert callback.reasons == [], "never retried"
    assert callback.end == (True, "FAILED")
    status = paceline.load_run(warm.latest_run_dir).status
    assert status.state == "FAILED"
    assert "CustomError" in status.reason
    assert warm.run(paceline.world_rank) == [0, 1]


def test_exception_in_one_rank_while_others_finish(warm):
    def train_func():
        if paceline.world_rank() == 1:
            raise KeyError("late")
        return "fine"

    with pytest.raises(KeyError, match="late"):
        warm.run(train_func)


def test_ranks_report_unequally(warm):
    def train_func():
        for _ in range(2 + paceline.world_rank()):
            paceline.report(x=1)

    with pytest.raises(RuntimeError, match=r"rank 0 ended after 2 .*rank 1 has made 3"):
        warm.run(train_func)
    assert paceline.load_run(warm.latest_run_dir).metrics["step"].tolist() == [1, 1, 2, 2, 3], "all that was reported"


def test_exception_outranks_unequal_reports(warm):
    def train_func():
        for _ in range(2):
            paceline.report(x=1)
        if paceline.world_rank() == 1:
            paceline.report(x=1)
            raise LookupError("the real reason")

    with pytest.raises(LookupError, match="the real reason"):
        warm.run(train_func)


def test_report_and_save_in_different_order_on_the_ranks_is_fine(warm):
    """Reports pair with reports: nobody waits, so there is nothing to get out of step."""

    def train_func():
        if paceline.world_rank() == 0:
            paceline.save_checkpoint(x=1)
            paceline.report(x=1)
        else:
            paceline.report(x=1)
            paceline.save_checkpoint(x=1)
        return "fine"

    assert warm.run(train_func) == ["fine", "fine"]


def test_report_takes_keywords_only(warm):
    with pytest.raises(TypeError, match=r"report\(\*\*metrics\)"):
        warm.run(lambda: paceline.report({"loss": 1}))


def test_metric_that_cannot_be_sent_is_named(warm):
    with pytest.raises(TypeError, match=r"report\(lock=...\)"):
        warm.run(lambda: paceline.report(loss=1, lock=threading.Lock()))


def test_function_that_cannot_be_sent(warm):
    lock = threading.Lock()
    with pytest.raises(paceline.PacelineError, match=r"train_func .*cannot be pickled"):
        warm.run(lambda: lock)
    assert warm.run(paceline.world_rank) == [0, 1]


def test_callback_that_raises_ends_the_run_and_leaves_the_trainer_usable(warm):
    class Broken(SGDCallback):
        def handle_result(self, results, **info):
            raise OSError("disk full")

    witness = Restarts()
    witness.handle_result = lambda results, **info: None

    def train_func():
        while True:
            paceline.report(x=1)

    with pytest.raises(OSError, match="disk full"):
        warm.run(train_func, callbacks=[witness, Broken()])
    assert witness.end == (True, "FAILED")
    assert warm.run(paceline.world_rank) == [0, 1]


def test_callback_that_fails_to_start(warm):
    class Broken(SGDCallback):
        def start_training(self, logdir, config, **info):
            raise ValueError("no account")

    with pytest.raises(ValueError, match="no account"):
        warm.run(lambda: None, callbacks=[Broken()])
    assert paceline.load_run(warm.latest_run_dir).status.state == "FAILED"
    assert warm.run(paceline.world_rank) == [0, 1]


def test_callback_that_calls_the_trainer_again_is_told(warm):
    class Again(SGDCallback):
        def handle_result(self, results, **info):
            warm.run(lambda: None)

    with pytest.raises(RuntimeError, match="in the middle of a run"):
        warm.run(lambda: paceline.report(x=1), callbacks=[Again()])


def test_idle_worker_is_killed_between_runs(warm, wait_for_end):
    pid = warm.execute_single(os.getpid, rank=1)
    os.kill(pid, signal.SIGKILL)
    wait_for_end([pid])
    assert warm.run(paceline.world_rank) == [0, 1]


def test_nursery_is_killed_and_replaced():
    from paceline.workers import nursery

    with Trainer(backend=BackendConfig(), num_workers=2) as trainer:
        mother = psutil.Process(trainer.execute(os.getpid)[0]).ppid()
        [victim] = [one for one in nursery._shared.values() if one.pid == mother]

        class Kill(SGDCallback):
            def handle_checkpoint(self, checkpoint, **info):
                if checkpoint.id == 1:
                    os.kill(victim.pid, signal.SIGKILL)

        def train_func():
            again = paceline.load_checkpoint()
            paceline.save_checkpoint(x=1)
            paceline.load_checkpoint()
            paceline.report(x=1)
            while not again:
                threading.Event().wait(0.01)
            return "done"

        assert trainer.run(train_func, callbacks=[Kill()]) == ["done", "done"]


def test_children_of_a_worker_end_with_it(wait_for_end):
    def train_func():
        child = subprocess.Popen(["sleep", "1000"])
        paceline.report(pid=child.pid)
        while True:
            threading.Event().wait(0.01)

    trainer = Trainer(backend=BackendConfig(), num_workers=1)
    iterator = trainer.run_iterator(train_func)
    [result] = next(iterator)
    assert psutil.pid_exists(result["pid"])
    trainer.shutdown()
    wait_for_end([result["pid"]])


def test_rank_hangs_and_is_told_by_its_stacks():
    def get_stuck():
        while True:
            threading.Event().wait(1)

    def train_func():
        checkpoint = paceline.load_checkpoint()
        paceline.report(x=1)
        if checkpoint is None:
            paceline.save_checkpoint(x=1)
            if paceline.world_rank() == 1:
                get_stuck()
        torch.distributed.barrier()
        return "done"

    with Trainer(num_workers=2, hang_timeout_s=0.7, max_retries=-1) as trainer:  # a busy machine may seem to hang too
        assert trainer.run(train_func) == ["done", "done"]
        run = paceline.load_run(trainer.latest_run_dir)
        hangs = [event for event in run.events if event["kind"] == "hang"]
        texts = [Path(hang["stacks"]).read_text().split("=== rank 1 ===") for hang in hangs]
        assert any("barrier" in first and "get_stuck" in second for first, second in texts)
        assert Path(hangs[0]["stacks"]) == run.path / "logs" / "stacks_0.txt"


def test_stopped_process_counts_as_a_hang():
    def train_func():
        checkpoint = paceline.load_checkpoint()
        paceline.save_checkpoint(x=1)
        if checkpoint is None and paceline.world_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        torch.distributed.barrier()
        return "done"

    with Trainer(num_workers=2, hang_timeout_s=0.7, max_retries=-1) as trainer:
        assert trainer.run(train_func) == ["done", "done"]


def test_stacks_on_demand(warm):
    seen = {}

    class Look(SGDCallback):
        def handle_result(self, results, **info):
            seen.update(warm.stacks())
            warm.stop()

    def spin_here():
        paceline.report(x=1)
        while not paceline.should_stop():
            threading.Event().wait(0.01)

    warm.run(spin_here, callbacks=[Look()])
    assert sorted(seen) == [0, 1]
    assert "spin_here" in seen[0]
    assert "spin_here" in seen[1]


def test_stacks_without_workers():
    with pytest.raises(RuntimeError, match="no workers"):
        Trainer(num_workers=1, logdir="unused").stacks()


def test_disk_full_while_logging_does_not_end_the_training():
    def train_func():
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        for _ in range(1000):
            print("a line that no longer fits")
        return "done"

    with Trainer(backend=BackendConfig(), num_workers=1) as trainer:
        assert trainer.run(train_func) == ["done"]
        assert 0 < len(paceline.load_run(trainer.latest_run_dir).log(0)) <= 100


def test_disk_full_while_saving():
    def train_func():
        import resource

        paceline.save_checkpoint(epoch=1)
        paceline.load_checkpoint()
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        paceline.save_checkpoint(epoch=2, weights=torch.zeros(10_000))

    with Trainer(num_workers=1) as trainer:
        with pytest.raises(OSError, match="checkpoint_000002"):
            trainer.run(train_func)
        assert trainer.latest_checkpoint == {"epoch": 1}, "what was committed is safe"
        assert [path.name for path in trainer.latest_checkpoint_dir.iterdir()] == ["checkpoint_000001"]


def test_checkpoint_that_is_being_written_when_a_worker_dies_is_finished(warm):
    def train_func():
        checkpoint = paceline.load_checkpoint()
        if checkpoint is not None:
            return checkpoint["step"]
        paceline.save_checkpoint(step=7, weights=torch.zeros(10_000_000))
        torch.distributed.barrier()
        if paceline.world_rank() == 1:
            kill_self()
        torch.distributed.barrier()
        return None

    assert warm.run(train_func) == [7, 7]


def test_checkpoint_that_is_being_written_when_the_function_raises_is_finished(warm):
    def train_func():
        paceline.save_checkpoint(step=7, weights=torch.zeros(10_000_000))
        torch.distributed.barrier()  # no rank fails before rank 0 has called it
        raise ValueError("too bad")

    with pytest.raises(ValueError, match="too bad"):
        warm.run(train_func)
    assert warm.latest_checkpoint["step"] == 7


class SlowOnce(SGDCallback):
    def handle_result(self, results, **info):
        if results[0]["step"] == 5:
            threading.Event().wait(2.5)


def test_slow_driver_is_no_hang_of_the_workers(tmp_path):
    def train_quickly(config):  # in here, so that no worker has to import this module, and torch with it
        for step in range(1, 40):
            paceline.report(step=step)
            threading.Event().wait(0.01)

    with Trainer(BackendConfig(), num_workers=2, hang_timeout_s=2, engine="local", logdir=tmp_path) as trainer:
        trainer.run(train_quickly, {}, callbacks=[SlowOnce()])
        with trainer.run_iterator(train_quickly, {}) as steps:
            next(steps)
            threading.Event().wait(2.5)
            steps.get_final_results(force=True)
    for run in paceline.list_runs(tmp_path):
        assert [event["kind"] for event in run.events if event["kind"] in ("hang", "restart")] == []


def test_stop_from_another_thread_does_not_tear_what_a_worker_is_being_told(tmp_path):
    """The answers to a worker that loads from the driver's memory are large, and a stop may come in their midst."""
    done = threading.Event()

    def save_and_load_much(config):
        for step in range(4):
            paceline.save_checkpoint(step=step, much=bytes(12_000_000))
            assert len(paceline.load_checkpoint()["much"]) == 12_000_000
        return "whole"

    def stop_again_and_again():
        while not done.wait(0.0005):
            trainer.stop()

    with Trainer(BackendConfig(), num_workers=1, engine="local", logdir=tmp_path) as trainer:
        thread = threading.Thread(target=stop_again_and_again, name="paceline-test-stop")
        thread.start()
        try:
            values = trainer.run(save_and_load_much, {}, checkpoint_strategy=CheckpointStrategy(num_to_keep=0))
        finally:
            done.set()
            thread.join()
    assert values == ["whole"]
