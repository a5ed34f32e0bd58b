"""DistributedSGD with real workers: training, what is known of it, and workers that are lost."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest
from sgd_models import (
    Counting,
    Dying,
    DyingLate,
    Forking,
    Line,
    OddModel,
    Raising,
    Ringing,
    Splitting,
    Straying,
    Stuck,
    Untold,
    creator,
    digest,
    whole,
)

import paceline
from paceline.errors import (
    ArgumentError,
    CheckpointNotFoundError,
    TrainerStateError,
    TrainFunctionError,
    WorkersLostError,
)
from paceline.sgd import DistributedSGD

STRATEGIES = ["allreduce", "ps", "simple"]


def quiet(creator, num_workers=2, devices=1, strategy="allreduce", **more):
    return DistributedSGD(creator, num_workers, devices, use_cpus=True, strategy=strategy, verbose=False, **more)


def check_whole(weights, num_steps):
    for name, value in whole(num_steps).items():
        np.testing.assert_allclose(weights[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("strategy", "devices"), [("allreduce", 1), ("allreduce", 2), ("ps", 2), ("simple", 1)])
def test_all_that_a_trained_model_is_good_for(strategy, devices, tmp_path):
    with quiet(creator(devices), devices=devices, strategy=strategy) as sgd:
        assert len(set(sgd.foreach_model(digest))) == 1  # before the first step
        sgd.warmup()
        for number in range(1, 4):
            result = sgd.step()
            assert result.step == sgd.num_steps == number
            assert len(set(sgd.foreach_model(digest))) == 1
        num_replicas = 2 * devices
        assert len(result.losses) == num_replicas
        assert result == pytest.approx(sum(result.losses) / num_replicas)
        assert result["part"] == pytest.approx((num_replicas - 1) / 2)
        assert result.metrics["twice"] == pytest.approx(num_replicas - 1)
        assert sgd.foreach_model(lambda model: model.part) == list(range(num_replicas))
        assert sgd.foreach_worker(len) == [devices] * 2
        assert sgd.for_model(lambda model: model.num_losses) == 3
        check_whole(sgd.get_weights(), 3)
        assert sgd.validate()["distance"] == pytest.approx(sgd.get_weights()["scale"] + (num_replicas - 1) / 2)
        path = sgd.save_checkpoint(tmp_path)
        sgd.for_model(lambda model: model.get_loss().backward())  # is nobody's business but the user's
        sgd.step()
        model = sgd.get_model()
        check_whole({name: value.numpy() for name, value in model.state_dict().items()}, 4)
        after = sgd.foreach_model(digest)
        sgd.restore_checkpoint(path)
        assert sgd.num_steps == 3
        sgd.step()
        assert sgd.foreach_model(digest) == after  # with the momentum
        sgd.set_weights({name: np.zeros_like(value) for name, value in sgd.get_weights().items()})
        assert not any(value.any() for value in sgd.get_weights().values())
    run = paceline.load_run(sgd.run_dir)
    assert run.status.state == "SUCCEEDED"
    assert run.request["strategy"] == strategy
    assert "paceline_sgd" not in Path("/proc/self/maps").read_text(), "who keeps it does not keep its memory"


def test_models_of_numpy_by_collectives():
    with quiet(lambda worker, device: Line(2 * worker + device), devices=2) as sgd:
        for _ in range(2):
            sgd.step()
        weights = sgd.foreach_model(lambda model: model.weights)
    expected, momentum = 1.0, 0.0
    for _ in range(2):
        momentum = 0.5 * momentum + np.mean([2 * (expected - part) for part in range(4)])
        expected -= 0.1 * momentum
    np.testing.assert_allclose(weights[0]["slope"], expected)
    assert all((one["slope"] == weights[0]["slope"]).all() for one in weights)
    np.testing.assert_allclose(weights[0]["offset"], -0.1 * (0.5 + 0.75), rtol=1e-6)


def test_in_this_process():
    with quiet(creator(2, 1), num_workers=0, devices=2) as sgd:
        for _ in range(3):
            sgd.step()
        check_whole(sgd.get_weights(), 3)
        assert sgd.for_model(lambda model: os.getpid()) == os.getpid()
    assert paceline.load_run(sgd.run_dir).status.state == "SUCCEEDED"


def test_the_run_is_like_any_other(tmp_path):
    class Listener(paceline.Callback):
        losses = []  # noqa: RUF012

        def handle_result(self, results, **info):
            self.losses.append(results[0]["loss"])

    sgd = quiet(lambda worker: Line(worker), strategy="simple", callbacks=[Listener()], config={"lr": 0.1})
    losses = [sgd.step() for _ in range(3)]
    path = sgd.save_checkpoint()
    sgd.report_progress(0.5)
    sgd.shutdown()
    sgd.shutdown()
    run = paceline.load_run(sgd.run_dir)
    frame = run.metrics
    assert frame[frame["rank"] == 0]["loss"].tolist() == losses == Listener.losses
    assert frame[frame["rank"] == 1]["worker_loss"].tolist() == [loss.losses[1] for loss in losses]
    assert run.config == {"lr": 0.1}
    assert [info.path for info in run.checkpoints] == [path]
    with pytest.raises(TrainerStateError, match="has ended"):
        sgd.step()
    with quiet(lambda: Line(0), num_workers=1) as other:
        other.restore_checkpoint(path)
        assert other.num_steps == 3
        with pytest.raises(CheckpointNotFoundError):
            other.restore_checkpoint(tmp_path)
        with pytest.raises(ArgumentError, match="no state of a DistributedSGD"):
            other.load_state_dict({"step": 1})


def test_what_is_printed(capfd):
    with DistributedSGD(lambda: Line(0), num_workers=2, strategy="simple", use_cpus=True) as sgd:
        print("Current loss", sgd.step())
    lines = capfd.readouterr().out.splitlines()
    assert [line.rpartition(" ")[0] for line in lines] == [
        "compute grad interior time",
        "compute grad interior time",
        "compute all grads time",
        "grad reduce time",
        "apply grad interior time",
        "apply grad interior time",
        "apply all grads time",
        "Current loss",
    ]
    assert all(float(line.rpartition(" ")[2]) >= 0 for line in lines)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_worker_is_killed(strategy, tmp_path):
    """In the middle of a step, and between two: nothing is left out, and nothing is done twice."""
    with quiet(lambda worker: Dying(worker, tmp_path / "died"), strategy=strategy) as sgd:
        for number in range(1, 5):
            result = sgd.step()
            assert (result.step, len(result.losses)) == (number, 2)
        os.kill(sgd.foreach_worker(lambda models: os.getpid())[0], signal.SIGKILL)
        assert sgd.get_weights()["sum"] == 1 + 2 + 3 + 4
        assert sgd.step().step == 5
        assert sgd.foreach_model(lambda model: (model.next, model.weights["sum"].item())) == [(5, 15.0)] * 2
    run = paceline.load_run(sgd.run_dir)
    assert run.status.state == "SUCCEEDED"
    assert [event["step"] for event in run.events if event["kind"] == "recovered"] == [2, 4]
    frame = run.metrics
    assert frame[frame["rank"] == 0]["step"].tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("strategy", ["allreduce", "simple"])
def test_worker_is_killed_when_another_has_made_the_step(strategy, tmp_path):
    """What it had read for that counts as read, also if it could not tell."""
    with quiet(lambda worker: DyingLate(worker, tmp_path / "died"), strategy=strategy) as sgd:
        results = [sgd.step() for _ in range(4)]
        assert [result.step for result in results] == [1, 2, 3, 4]
        told = 1 if strategy == "allreduce" else 2
        assert [len(result.losses) for result in results] == [2, 2, told, 2]
        assert sgd.foreach_model(lambda model: (model.next, model.weights["sum"].item())) == [(4, 10.0)] * 2
    frame = paceline.load_run(sgd.run_dir).metrics
    assert frame[frame["rank"] == 0]["step"].tolist() == [1, 2, 3, 4]


def test_worker_is_killed_before_a_checkpoint_is_restored(tmp_path):
    with quiet(lambda: Counting(), strategy="simple") as sgd:
        sgd.step()
        path = sgd.save_checkpoint(tmp_path)
        sgd.step()
        sgd.step()
        os.kill(sgd.foreach_worker(lambda models: os.getpid())[1], signal.SIGKILL)
        sgd.restore_checkpoint(path)
        assert (sgd.num_steps, sgd.step().step) == (1, 2)
        assert sgd.foreach_model(lambda model: (model.next, model.weights["sum"].item())) == [(2, 3.0)] * 2


def test_the_optimizer_survives_too():
    with quiet(creator(1)) as sgd:
        for number in range(4):
            if number == 2:
                os.kill(sgd.foreach_worker(lambda models: os.getpid())[1], signal.SIGKILL)
            sgd.step()
        check_whole(sgd.get_weights(), 4)
        assert len(set(sgd.foreach_model(digest))) == 1


def test_who_takes_the_place_of_a_killed_worker_has_no_model(tmp_path):
    """The run is over, whatever was asked for meanwhile: there is nobody left to ask."""

    def create():
        if (tmp_path / "gone").exists():
            raise FileNotFoundError("the data is gone")
        return Counting()

    sgd = quiet(create, strategy="simple")
    pids = sgd.foreach_worker(lambda models: os.getpid())
    (tmp_path / "gone").touch()
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(FileNotFoundError, match="the data is gone"):
        sgd.foreach_model(lambda model: model.next)
    with pytest.raises(TrainerStateError, match="has ended"):
        sgd.step()
    assert paceline.load_run(sgd.run_dir).status.reason == "FileNotFoundError: the data is gone"


def test_worker_is_killed_and_not_replaced(tmp_path):
    with quiet(lambda worker: Dying(worker, tmp_path / "died"), max_retries=0) as sgd:
        sgd.step()
        sgd.step()
        with pytest.raises(WorkersLostError, match=r"max_retries=0\): rank 1 was killed by SIGKILL"):
            sgd.step()
    status = paceline.load_run(sgd.run_dir).status
    assert status.state == "FAILED"
    assert "rank 1 was killed" in status.reason


def test_the_only_worker_is_killed():
    with quiet(lambda: Counting(), num_workers=1) as sgd:
        sgd.step()
        os.kill(sgd.foreach_worker(lambda models: os.getpid())[0], signal.SIGKILL)
        with pytest.raises(WorkersLostError, match="No worker is left that has the state"):
            sgd.step()


@pytest.mark.parametrize("strategy", ["allreduce", "simple"])
def test_a_model_raises(strategy):
    with quiet(lambda worker: Raising(worker), strategy=strategy) as sgd:
        sgd.step()
        with pytest.raises(FloatingPointError, match="not finite") as caught:
            sgd.step()
    assert "rank 1" in caught.value.__notes__[0]
    status = paceline.load_run(sgd.run_dir).status
    assert (status.state, status.reason) == ("FAILED", "FloatingPointError: the loss is not finite")


def test_what_a_model_tells_cannot_be_read_here():
    with quiet(lambda: Untold()) as sgd:
        with pytest.raises(TrainFunctionError, match="ZeroDivisionError") as caught:
            sgd.step()
        assert "in the training function on rank " in caught.value.__notes__[0]
    assert paceline.load_run(sgd.run_dir).status.state == "FAILED"


def test_a_function_raises_and_training_goes_on():
    with quiet(lambda worker: Counting(), strategy="ps") as sgd:
        sgd.step()
        with pytest.raises(ZeroDivisionError):
            sgd.foreach_model(lambda model: 1 / 0)
        with pytest.raises(TrainFunctionError, match="cannot be pickled"):
            sgd.foreach_model(lambda model: threading.Lock())
        sgd.foreach_model(lambda model: setattr(model, "batches", (n for n in range(3))))
        with pytest.raises(TrainFunctionError, match="cannot be pickled") as caught:
            sgd.get_model()
        assert any("__getstate__" in note for note in caught.value.__notes__)
        with pytest.raises(TrainFunctionError, match="KeyboardInterrupt"):
            sgd.foreach_model(raise_interrupt)
        with pytest.raises(ArgumentError, match="unknown: other"):
            sgd.set_weights({"other": np.ones(1)})
        assert sgd.step().step == 2


def raise_interrupt(model):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("strategy", "how", "code"),
    [("simple", lambda: None, 0), ("simple", lambda: sys.exit(3), 3), ("allreduce", lambda: None, 0)],
    ids=["returns", "exits", "returns before a collective"],
)
def test_process_that_a_model_has_forked_ends_where_the_model_does(strategy, how, code):
    """It would answer, and be told what to do, in the name of the worker."""
    with quiet(lambda: Forking(how), strategy=strategy, hang_timeout_s=30) as sgd:
        assert [sgd.step().losses for _ in range(3)] == [[1.0] * 2, [2.0] * 2, [3.0] * 2]
        found = sgd.foreach_model(lambda model: os.waitstatus_to_exitcode(model.status))
        assert found == [code] * 2
        os.kill(sgd.foreach_worker(lambda models: os.getpid())[1], signal.SIGKILL)
        assert sgd.step().losses == [4.0] * 2, "what tells where they are has travelled"


def test_such_a_process_in_the_middle_of_collectives():
    with quiet(lambda worker: Splitting(worker, 2), hang_timeout_s=30) as sgd:
        places = ["get_loss", "backward", "get_metrics", "get_position"]
        for place in places:
            sgd.foreach_model(lambda model, place=place: setattr(model, "where", place))
            sgd.step()
        assert sgd.foreach_model(lambda model: model.codes) == [[0] * len(places)] * 2
        check_whole(sgd.get_weights(), len(places))


def test_such_a_process_does_not_touch_the_memory_that_workers_share():
    with quiet(lambda: Straying(), strategy="ps", hang_timeout_s=30) as sgd:
        sgd.step()
        assert sgd.get_weights() == {"sum": [1.0]}


@pytest.mark.parametrize(("how", "code"), [(lambda: None, 0), (lambda: sys.exit(3), 3)], ids=["returns", "exits"])
def test_such_a_process_of_a_model_in_this_process(how, code):
    """It would go on with the user's program, or end the run in the name of its parent."""
    driver = os.getpid()
    with quiet(lambda: Forking(how), num_workers=0) as sgd:
        try:
            sgd.step()
        finally:
            if os.getpid() != driver:
                os._exit(9)
        assert sgd.for_model(lambda model: os.waitstatus_to_exitcode(model.status)) == code


@pytest.fixture
def on_alarm():
    """Sets what this process does when it gets SIGALRM."""
    former = signal.getsignal(signal.SIGALRM)
    yield lambda act: signal.signal(signal.SIGALRM, lambda number, frame: act())
    signal.signal(signal.SIGALRM, former)


def test_shutdown_in_the_middle_of_a_step(on_alarm):
    driver, refused = os.getpid(), []

    def shut_down():
        with pytest.raises(TrainerStateError, match="in the middle of a call") as caught:
            sgd.shutdown()
        refused.append(caught.value)

    on_alarm(shut_down)
    with quiet(lambda: Ringing(driver), num_workers=1) as sgd:
        assert [sgd.step().step for _ in range(2)] == [1, 2]
        assert len(refused) == 2
    assert paceline.load_run(sgd.run_dir).status.state == "SUCCEEDED"


def ring(driver):
    if paceline.world_rank() == 0:
        os.kill(driver, signal.SIGALRM)


def test_handler_raises_while_a_function_is_waited_for(on_alarm):
    """Workers owe answers that nobody waits for any more, so this is the end."""
    driver = os.getpid()

    def give_up():
        raise TimeoutError("that is enough")

    on_alarm(give_up)
    with quiet(lambda: Counting()) as sgd:
        sgd.step()
        with pytest.raises(TimeoutError, match="that is enough"):
            sgd.foreach_model(lambda model: (ring(driver), threading.Event().wait()))
        with pytest.raises(TrainerStateError, match="has ended"):
            sgd.step()
    status = paceline.load_run(sgd.run_dir).status
    assert (status.state, status.reason) == ("FAILED", "TimeoutError: that is enough")


def test_a_fork_of_the_driver():
    with quiet(lambda: Counting(), num_workers=0) as sgd:
        sgd.step()
        if (pid := os.fork()) == 0:
            try:
                sgd.step()
            except TrainerStateError as error:
                os._exit(3 if "is a fork" in str(error) else 2)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
        assert sgd.step().step == 2


def test_worker_is_killed_while_models_are_made(tmp_path):
    def create(worker):
        if worker == 1 and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return Counting()

    flag = tmp_path / "died"
    with quiet(create, strategy="simple") as sgd:
        assert sgd.step().step == 1
    events = paceline.load_run(sgd.run_dir).events
    assert [event["step"] for event in events if event["kind"] == "recovered"] == [0]


@pytest.mark.parametrize("when", ["at the beginning", "when workers are replaced"])
def test_model_creator_hangs(when, tmp_path, monkeypatch):
    def create():
        if flag.exists():
            threading.Event().wait()
        return Counting()

    monkeypatch.setattr("paceline.sgd.link.BUSY_S", 0.5)
    flag = tmp_path / "hang"
    sgd = quiet(create, strategy="simple", hang_timeout_s=0.4 if when == "at the beginning" else None)
    if when == "when workers are replaced":
        sgd.step()
        os.kill(sgd.foreach_worker(lambda models: os.getpid())[1], signal.SIGKILL)
    flag.touch()
    with pytest.raises(WorkersLostError, match=r"Rank 0, 1 did not answer within .* s\..*making the models"):
        sgd.step()
    assert paceline.load_run(sgd.run_dir).status.state == "FAILED"


def test_models_that_differ():
    def create(worker):
        model = Counting()
        if worker == 1:
            model.weights["more"] = np.ones(2)
        return model

    with pytest.raises(ArgumentError, match="1 weights and 2"):
        quiet(create, strategy="simple").start()


def test_worker_hangs():
    sgd = quiet(lambda: Stuck(), strategy="simple", hang_timeout_s=0.5)
    with pytest.raises(WorkersLostError, match=r"did not answer within hang_timeout_s=0\.5") as caught:
        sgd.step()
    [stacks] = (sgd.run_dir / "logs").glob("hang_*")
    assert str(stacks) in str(caught.value)
    assert "loss_and_grad" in stacks.read_text()


BEGINNING = {"replica": {"weights": {"sum": [0.0]}}, "step": 0, "positions": []}


@pytest.mark.parametrize(
    ("strategy", "call"),
    [("simple", lambda sgd: sgd.load_state_dict(BEGINNING)), ("allreduce", lambda sgd: sgd.warmup())],
    ids=["load_state_dict", "warmup"],
)
def test_worker_is_stopped(strategy, call, monkeypatch):
    """In a collective, the other does not answer either: it is told who is to blame."""
    sgd = quiet(lambda: Counting(), strategy=strategy, hang_timeout_s=0.5)
    sgd.start()
    monkeypatch.setattr("paceline.sgd.link.BUSY_S", 0.5)
    os.kill(sgd.foreach_worker(lambda models: os.getpid())[1], signal.SIGSTOP)
    expected = r"1 did not answer within .*\. No stacks came from rank 1:"
    with pytest.raises(WorkersLostError, match=expected):
        call(sgd)
    assert paceline.load_run(sgd.run_dir).status.state == "FAILED"


class Reading(OddModel):
    """Every row of the run's dataset adds its value to the only weight."""

    def __init__(self):
        import torch

        self.module = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(self.module.weight)
        self.batches = self._batches()
        self.seen = []

    def _batches(self):
        shard = paceline.get_data_shard()
        while True:
            yield from shard.iter_batches(1)

    def get_loss(self):
        import torch

        [value] = next(self.batches)["x"]
        self.seen.append(float(value))
        return -self.module.weight.sum() * torch.tensor(float(value))

    def get_optimizer(self):
        import torch

        return torch.optim.SGD(self.module.parameters(), lr=1.0)

    def get_metrics(self):
        return {}


def test_rows_of_a_dataset_each_once_though_a_worker_is_killed(tmp_path):
    dataset = paceline.data.from_numpy({"x": np.arange(8.0)})
    with quiet(lambda: Reading(), dataset=dataset) as sgd:
        sgd.step()
        sgd.step()
        path = sgd.save_checkpoint(tmp_path)
        os.kill(sgd.foreach_worker(lambda models: os.getpid())[1], signal.SIGKILL)
        sgd.step()
        sgd.step()
        assert sgd.get_weights()["weight"].item() == sum(range(8)) / 2
    with quiet(lambda: Reading(), num_workers=1, dataset=dataset) as sgd:  # and on another number of workers
        sgd.restore_checkpoint(path)
        for _ in range(4):
            sgd.step()
        assert sgd.for_model(lambda model: model.seen) == [4, 5, 6, 7]


SCRIPT = """
    import os, sys
    import numpy as np
    from paceline.sgd import DistributedSGD, NumpyModel

    class Line(NumpyModel):
        def __init__(self):
            self.weights = {"a": np.ones(2)}

        def loss_and_grad(self):
            return 1.0, {"a": np.ones(2)}

    sgd = DistributedSGD(lambda worker_idx, device_idx: Line(), num_workers=2, strategy="simple", use_cpus=True,
                         verbose=False, logdir=sys.argv[1])
    for _ in range(3):
        loss = sgd.step()
    {last}
"""


@pytest.mark.parametrize(
    ("last", "code", "state"),
    [("", 0, "SUCCEEDED"), ("raise ValueError('oh')", 1, "FAILED"), ("os.kill(os.getpid(), 9)", -9, "LOST")],
)
def test_a_script_that_does_not_shut_down(last, code, state, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT).replace("{last}", last))
    done = subprocess.run([sys.executable, str(script), str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert "Exception ignored" not in done.stderr, "what it ends with is ended well"
    run = paceline.load_run(tmp_path)
    assert run.status.state == state
    if state == "FAILED":
        assert run.status.reason == "ValueError: oh"
