"""The function API on real gloo workers."""

import os
import threading

import psutil
import pytest
import torch

import paceline
from paceline import BackendConfig, CheckpointStrategy, SGDCallback, TorchConfig, Trainer


class Recorder(SGDCallback):
    """Keeps what it is told, in order."""

    def __init__(self):
        self.calls = []

    def start_training(self, logdir, config, **info):
        self.calls.append(("start", logdir, config, info))

    def handle_result(self, results, **info):
        self.calls.append(("result", results))

    def handle_checkpoint(self, checkpoint, **info):
        self.calls.append(("checkpoint", checkpoint.id))

    def finish_training(self, error=False, **info):
        self.calls.append(("finish", error, info))

    @property
    def results(self):
        return [call[1] for call in self.calls if call[0] == "result"]


def train_ddp(config):
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(paceline.world_rank())
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=config.get("lr", 0.1))
    inputs, targets = torch.randn(8, 4), torch.randn(8, 1)
    losses = []
    for _ in range(config.get("epochs", 3)):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        paceline.report(loss=loss)
    return losses, model.module.weight.detach()


def test_plain_ddp_code_trains_and_the_ranks_agree(warm):
    (losses_0, weight_0), (losses_1, weight_1) = warm.run(train_ddp, {"epochs": 4})
    assert len(losses_0) == 4
    assert losses_0 != losses_1, "each rank has data of its own"
    assert torch.equal(weight_0, weight_1), "and all have the same model"


def test_results_come_by_rank_and_each_run_has_its_own_config(warm):
    def train_func(config):
        return [config["n"], paceline.world_rank(), paceline.world_size()]

    assert warm.run(train_func, config={"n": 2}) == [[2, 0, 2], [2, 1, 2]]
    assert warm.run(train_func, config={"n": 5}) == [[5, 0, 2], [5, 1, 2]]


@pytest.mark.parametrize(
    "train_func",
    [
        lambda: "none",
        lambda config: config["x"],
        lambda config, more=1: config["x"],
        lambda config={}: config["x"],
        lambda *args: args[0]["x"],
    ],
    ids=["none", "config", "config and a default", "default", "star"],
)
def test_function_takes_nothing_or_the_config(warm, train_func):
    assert warm.run(train_func, {"x": "none"}) == ["none", "none"]


def test_config_is_copied_for_each_worker_and_run(warm):
    config = {"items": [1]}

    def change(config):
        config["items"].append(2)
        return config["items"]

    assert warm.run(change, config) == [[1, 2], [1, 2]]
    assert config == {"items": [1]}


def test_reports_of_all_ranks_reach_callbacks_in_order(warm):
    def train_func():
        for epoch in range(3):
            paceline.report(epoch=epoch, rank=paceline.world_rank())

    recorder = Recorder()
    warm.run(train_func, callbacks=[recorder])
    assert [[(r["epoch"], r["rank"]) for r in step] for step in recorder.results] == [
        [(epoch, 0), (epoch, 1)] for epoch in range(3)
    ]
    assert [r["_training_iteration"] for step in recorder.results for r in step] == [1, 1, 2, 2, 3, 3]
    assert all({"_timestamp", "_time_this_iter_s"} <= r.keys() for step in recorder.results for r in step)
    assert recorder.calls[0][0] == "start"
    assert recorder.calls[0][1] == str(warm.latest_run_dir)
    assert recorder.calls[-1][:2] == ("finish", False)


def test_detailed_metrics_behind_the_environment_variable(warm, monkeypatch):
    monkeypatch.setenv("SGD_RESULT_ENABLE_DETAILED_AUTOFILLED_METRICS", "1")
    recorder = Recorder()
    warm.run(lambda: [paceline.report(x=1) for _ in range(2)] and os.getpid(), callbacks=[recorder])
    first, second = recorder.results[0][0], recorder.results[1][0]
    assert {"_date", "_hostname", "_node_ip", "_pid", "_time_total_s"} <= first.keys()
    assert first["_pid"] != os.getpid()
    assert second["_time_total_s"] >= first["_time_total_s"]


def test_tensors_arrive_as_numbers_and_arrays(warm):
    def train_func():
        loss = torch.ones(1, requires_grad=True).sum() * 3
        values = torch.arange(3.0)
        paceline.report(
            loss=loss, values=values, half=torch.ones(2, dtype=torch.bfloat16), nested={"x": torch.tensor(2)}
        )
        values += 100  # what was reported does not change any more

    recorder = Recorder()
    warm.run(train_func, callbacks=[recorder])
    result = recorder.results[0][0]
    assert result["loss"] == 3.0
    assert type(result["loss"]) is float
    assert result["values"].tolist() == [0, 1, 2]
    assert result["half"].tolist() == [1, 1]
    assert result["nested"] == {"x": 2}


def test_return_value_may_be_a_ddp_model_of_a_class_of_this_module(warm):
    class Net(torch.nn.Linear):
        pass

    def train_func():
        return torch.nn.parallel.DistributedDataParallel(Net(2, 2)), {"score": 1.0}

    (model, scores), _ = warm.run(train_func)
    assert type(model).__name__ == "Net", "unwrapped: the driver has no process group"
    assert scores == {"score": 1.0}


def test_script_that_calls_init_process_group_itself_runs_unchanged(warm):
    def main():
        import torch.distributed as dist

        dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
        model(torch.ones(1, 1)).sum().backward()
        total = torch.ones(1) * int(os.environ["RANK"])
        dist.all_reduce(total)
        dist.destroy_process_group()
        return total.item(), int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])

    for _ in range(5):  # freeing the model after its group went wrong now and then
        assert warm.run(main) == [(1.0, 0, 2), (1.0, 1, 2)]
    assert warm.run(main) == [(1.0, 0, 2), (1.0, 1, 2)], "the group that it destroyed is there again"


def test_asking_for_another_process_group_backend_says_where_to_ask(warm):
    def main():
        torch.distributed.init_process_group("nccl")

    with pytest.raises(ValueError, match=r"TorchConfig\(backend='nccl'\)"):
        warm.run(main)


@pytest.mark.parametrize("warm", ["ray"], indirect=True)
def test_stateful_torchmetrics_synchronise_over_the_workers(warm):
    """Those of this machine do in test_integrations.py: there it is imported anyway, and that takes seconds."""

    def train_func():
        import torchmetrics

        metric = torchmetrics.MeanMetric()
        metric.update(float(paceline.world_rank() * 10))
        return metric.compute().item()

    assert warm.run(train_func) == [5.0, 5.0]


def test_function_runs_in_the_main_thread(warm):
    is_main = warm.engine.name == "local"  # a Ray actor's main thread belongs to Ray
    assert warm.run(lambda: threading.current_thread() is threading.main_thread()) == [is_main, is_main]


def test_workers_stay(warm):
    assert warm.run(os.getpid) == warm.run(os.getpid)


def test_workers_start_apart(warm, tmp_path):
    """New ones: those of others have the seeds that functions have given them."""
    with Trainer(backend=BackendConfig(), num_workers=2, engine=warm.engine.name, logdir=tmp_path) as trainer:
        one, other = trainer.execute(lambda: torch.rand(1).item())
    assert one != other, "no two workers draw the same random numbers"


def test_torch_threads_share_the_cores(warm):
    assert warm.run(lambda: torch.get_num_threads()) == [max(1, len(os.sched_getaffinity(0)) // 2)] * 2


def test_ranks_outside_and_inside(warm):
    def where():
        return (
            paceline.in_worker(),
            paceline.world_rank(),
            paceline.local_rank(),
            paceline.node_rank(),
            paceline.world_size(),
        )

    assert where() == (False, 0, 0, 0, 1)
    assert warm.run(where) == [(True, 0, 0, 0, 2), (True, 1, 1, 0, 2)]
    assert warm.execute(where) == [(True, 0, 0, 0, 2), (True, 1, 1, 0, 2)]


# --- run_iterator ----------------------------------------------------------------------------------------------------


def count_to(config):
    for number in range(config["n"]):
        paceline.report(number=number)
    return paceline.world_rank()


def test_iterate_over_results(warm):
    iterator = warm.run_iterator(count_to, {"n": 4})
    assert not iterator.is_finished()
    assert iterator.get_final_results() is None
    assert [[r["number"] for r in step] for step in iterator] == [[n, n] for n in range(4)]
    assert iterator.is_finished()
    assert iterator.get_final_results() == [0, 1]
    assert list(iterator) == []


def test_force_final_results_in_the_middle(warm):
    iterator = warm.run_iterator(count_to, {"n": 100})
    next(iterator)
    assert iterator.get_final_results(force=True) == [0, 1]
    assert iterator.is_finished()


def test_abandoned_iterator_leaves_the_trainer_usable(warm):
    iterator = warm.run_iterator(count_to, {"n": 10**9})
    next(iterator)
    run_dir = warm.latest_run_dir
    assert warm.run(count_to, {"n": 1}) == [0, 1]
    assert iterator.is_finished()
    assert paceline.load_run(run_dir).status.state == "STOPPED"


def test_exception_ends_the_iterator(warm):
    def fail():
        paceline.report(x=1)
        raise KeyError("lr")

    iterator = warm.run_iterator(fail)
    with pytest.raises(KeyError):
        list(iterator)
    assert iterator.is_finished()
    assert iterator.get_final_results() is None


# --- stop ------------------------------------------------------------------------------------------------------------


def test_stop_from_a_callback_ends_the_run_politely(warm):
    class EarlyStop(SGDCallback):
        def handle_result(self, results, **info):
            if results[0]["n"] == 3:
                warm.stop()

    def train_func():
        n = 0
        while not paceline.should_stop():
            n += 1
            if n <= 3:
                paceline.report(n=n)
        return "stopped"

    pids = warm.execute(os.getpid)
    assert warm.run(train_func, callbacks=[EarlyStop()]) == ["stopped", "stopped"]
    assert paceline.load_run(warm.latest_run_dir).status.state == "STOPPED"
    assert warm.execute(os.getpid) == pids, "nobody had to be killed"
    assert warm.run(paceline.should_stop) == [False, False]


# --- checkpoints -----------------------------------------------------------------------------------------------------


def count_epochs(config):
    checkpoint = paceline.load_checkpoint() or {}
    model = checkpoint.get("model", 0)
    for epoch in range(checkpoint.get("epoch", -1) + 1, config["num_epochs"]):
        model += epoch
        paceline.save_checkpoint(epoch=epoch, model=model)


def test_latest_checkpoint_and_its_places(warm):
    warm.run(count_epochs, {"num_epochs": 5})
    assert warm.latest_checkpoint == {"epoch": 4, "model": 10}
    assert warm.latest_checkpoint_dir == warm.latest_run_dir / "checkpoints"
    assert warm.latest_checkpoint_path == warm.latest_checkpoint_dir / "checkpoint_000005"


def test_run_starts_from_a_dict_or_a_path(warm):
    warm.run(count_epochs, {"num_epochs": 5}, checkpoint={"epoch": 2, "model": 3})
    assert warm.latest_checkpoint == {"epoch": 4, "model": 10}
    assert len(os.listdir(warm.latest_checkpoint_dir)) == 2
    path = warm.latest_checkpoint_path
    warm.run(count_epochs, {"num_epochs": 7}, checkpoint=path)
    assert warm.latest_checkpoint == {"epoch": 6, "model": 21}


def test_given_checkpoint_is_the_latest_until_one_is_saved(tmp_path):
    with Trainer(backend=BackendConfig(), num_workers=0, logdir=tmp_path) as trainer:
        trainer.run(lambda: None, checkpoint={"epoch": 2})
        assert trainer.latest_checkpoint == {"epoch": 2}
        assert trainer.latest_checkpoint_path is None
        assert trainer.latest_checkpoint_dir == trainer.latest_run_dir / "checkpoints"


@pytest.mark.parametrize("num_to_keep", [None, 0])
def test_run_that_saves_nothing_hides_no_checkpoint(tmp_path, num_to_keep):
    """Train, evaluate, take the model."""

    def places():
        return trainer.latest_checkpoint_dir, trainer.latest_checkpoint_path, trainer.best_checkpoint_path

    with Trainer(backend=BackendConfig(), num_workers=0, logdir=tmp_path) as trainer:
        trainer.run(count_epochs, {"num_epochs": 3}, checkpoint_strategy=CheckpointStrategy(num_to_keep=num_to_keep))
        trained_in, then = trainer.latest_run_dir, places()
        trainer.run(lambda: None, checkpoint={"epoch": 0})
        trainer.run(lambda: None)
        assert trainer.latest_run_dir == trained_in.parent / "run_003"
        assert trainer.latest_checkpoint == {"epoch": 2, "model": 3}
        assert places() == then
        assert then[0] == trained_in / "checkpoints"
        trainer.run(count_epochs, {"num_epochs": 1})
        assert trainer.latest_checkpoint == {"epoch": 0, "model": 0}
        assert trainer.latest_checkpoint_dir == trainer.latest_run_dir / "checkpoints"


def test_every_rank_loads_what_rank_0_saved(warm):
    def train_func():
        paceline.save_checkpoint(value=torch.full((3,), float(paceline.world_rank() + 1)))
        return paceline.load_checkpoint()["value"].tolist()

    assert warm.run(train_func) == [[1.0] * 3, [1.0] * 3]


def test_best_checkpoint_by_score(warm):
    def train_func():
        for epoch, loss in enumerate([3.0, 1.0, 2.0, 4.0]):
            paceline.save_checkpoint(epoch=epoch, loss=loss)

    strategy = CheckpointStrategy(num_to_keep=2, checkpoint_score_attribute="loss", checkpoint_score_order="min")
    warm.run(train_func, checkpoint_strategy=strategy)
    assert warm.best_checkpoint == {"epoch": 1, "loss": 1.0}
    assert warm.best_checkpoint_path == warm.latest_checkpoint_dir / "checkpoint_000002"
    kept = sorted(path.name for path in warm.latest_checkpoint_dir.iterdir())
    assert kept == ["checkpoint_000002", "checkpoint_000003", "checkpoint_000004"], "two best, and the latest"


def test_checkpoints_in_memory_only(warm):
    def train_func():
        first = paceline.load_checkpoint()
        weights = torch.zeros(2)
        paceline.save_checkpoint(weights=weights)
        weights += 1
        return first, paceline.load_checkpoint()["weights"].tolist()

    values = warm.run(train_func, checkpoint_strategy=CheckpointStrategy(num_to_keep=0))
    assert values == [(None, [0.0, 0.0])] * 2
    assert warm.latest_checkpoint["weights"].tolist() == [0.0, 0.0]
    assert warm.latest_checkpoint_path is None
    assert warm.best_checkpoint is None
    assert list(warm.latest_checkpoint_dir.iterdir()) == []


def test_directory_as_a_checkpoint(warm, tmp_path):
    def train_func(config):
        import tempfile
        from pathlib import Path

        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "weights.bin").write_bytes(b"abc")
            paceline.save_checkpoint(folder, epoch=1)
        loaded = paceline.load_checkpoint()
        return loaded["epoch"], (loaded.directory / "weights.bin").read_bytes()

    assert warm.run(train_func) == [(1, b"abc")] * 2
    assert (warm.latest_checkpoint.directory / "weights.bin").read_bytes() == b"abc"


def test_score_attribute_is_missing(warm):
    strategy = CheckpointStrategy(num_to_keep=1, checkpoint_score_attribute="loss")
    with pytest.raises(ValueError, match="loss"):
        warm.run(lambda: paceline.save_checkpoint(epoch=1), checkpoint_strategy=strategy)


def test_value_that_no_checkpoint_can_hold_safely(warm):
    with pytest.raises(TypeError, match="state_dict") as caught:
        warm.run(lambda: paceline.save_checkpoint(model=torch.nn.Linear(1, 1)))
    assert "save_checkpoint" in "".join(caught.value.__notes__), "the user's own line is in the traceback"


# --- the Trainer itself ----------------------------------------------------------------------------------------------


class Accumulator:
    def __init__(self, start, step=1):
        self.value, self.step = start, step

    def train(self):
        self.value += self.step + paceline.world_rank()
        return self.value


def test_class_api():
    trainer = Trainer(backend="torch", num_workers=2)
    trainer.start(Accumulator, [10], {"step": 5})
    assert trainer.execute(lambda w: w.train()) == [15, 16]
    assert trainer.execute(lambda w: w.train()) == [20, 22], "the object lives on"
    assert trainer.execute_single(lambda w: w.value) == 20
    assert trainer.execute_single(lambda w, more: w.value + more, 100, rank=1) == 122
    trainer.shutdown()


def test_initialization_hook_runs_on_every_worker():
    trainer = Trainer(backend=BackendConfig(), num_workers=2)
    trainer.start(initialization_hook=lambda: os.environ.update(HOOK=f"was here {paceline.world_rank()}"))
    assert trainer.run(lambda: os.environ["HOOK"]) == ["was here 0", "was here 1"]
    trainer.shutdown()


def test_execute_raises_the_users_exception_and_keeps_the_workers():
    with Trainer(backend="torch", num_workers=2) as trainer:
        pids = trainer.execute(os.getpid)
        with pytest.raises(ZeroDivisionError):
            trainer.execute(lambda: 1 / 0)
        assert trainer.execute(os.getpid) == pids


def test_execute_on_a_worker_that_dies_is_an_error_and_the_next_call_works():
    with Trainer(backend="torch", num_workers=2) as trainer:
        with pytest.raises(paceline.PacelineError, match="exit code 7"):
            trainer.execute_single(lambda: os._exit(7), rank=1)
        assert trainer.execute(paceline.world_rank) == [0, 1]


def test_run_starts_by_itself_and_after_shutdown():
    trainer = Trainer(backend="torch", num_workers=1)
    assert trainer.run(lambda: 1) == [1]
    trainer.shutdown()
    trainer.shutdown()
    assert trainer.run(lambda: 2) == [2]
    trainer.start()
    trainer.shutdown()


def test_start_twice_is_fine_and_with_other_arguments_it_is_an_error():
    with Trainer(backend=BackendConfig(), num_workers=1) as trainer:
        trainer.start()
        with pytest.raises(RuntimeError, match="shutdown"):
            trainer.start(Accumulator, [1])


def test_attributes_before_the_first_run(results_dir):
    trainer = Trainer(backend=BackendConfig(), num_workers=1, logdir="here")
    assert trainer.logdir == results_dir / "here"
    assert trainer.latest_run_dir is None
    assert trainer.latest_checkpoint is None
    assert trainer.latest_checkpoint_dir is None
    assert trainer.latest_checkpoint_path is None
    assert trainer.best_checkpoint is None


def test_runs_are_numbered(warm):
    warm.run(lambda: None)
    number = int(warm.latest_run_dir.name.removeprefix("run_"))
    warm.run(lambda: None)
    assert warm.latest_run_dir.name == f"run_{number + 1:03d}"
    assert warm.latest_run_dir.parent == warm.logdir


def test_two_trainers_side_by_side():
    with Trainer(num_workers=1, logdir="a") as one, Trainer(num_workers=1, logdir="b") as two:
        assert one.run(os.getpid) != two.run(os.getpid)


def test_process_group_settings_reach_torch():
    with Trainer(backend=TorchConfig(init_method="tcp", timeout_s=77), num_workers=2) as trainer:
        assert trainer.run(lambda: torch.distributed.get_backend()) == ["gloo", "gloo"]


def test_process_group_listens_only_where_its_workers_reach_it(warm):
    """On one machine that is loopback. The sockets of a Ray worker that are Ray's own are not looked at."""

    def listening():
        sockets = [one.laddr for one in psutil.Process().net_connections("tcp") if one.status == psutil.CONN_LISTEN]
        return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), [(one.ip, one.port) for one in sockets]

    answers = warm.run(listening)
    address, port, sockets = answers[0]
    assert [ip for ip, at in sockets if at == port] == [address]
    if warm.engine.name == "local":
        assert {ip for _, _, found in answers for ip, _ in found} == {"127.0.0.1"}
        assert len(answers[1][2]) > 0, "gloo's are among them"


def test_print_shows_a_table_of_workers(warm):
    pids = warm.execute(os.getpid)  # first: what another test has left may make it renew them
    text = str(warm)
    for pid in pids:
        assert str(pid) in text
    assert "MiB" in text
    assert "cpu" in text
    assert "not started" in str(Trainer(num_workers=3, logdir="unused"))


def test_run_folder_tells_the_whole_story(warm):
    def train_func(config):
        print("a line of the log")
        paceline.enable_reproducibility(5)
        paceline.report(loss=0.5)
        paceline.save_checkpoint(step=1)

    warm.run(train_func, {"lr": 0.1})
    run = paceline.load_run(warm.latest_run_dir)
    assert run.config == {"lr": 0.1}
    assert run.status.state == "SUCCEEDED"
    assert run.metrics[["rank", "loss"]].values.tolist() == [[0, 0.5], [1, 0.5]]
    assert [info.id for info in run.checkpoints] == [1]
    assert run.seed == 5
    assert run.log(0) == "a line of the log\n"
    assert "torch" in run.environment["packages"]
    assert "train_func" in run.request["function"]["source"]
    assert {"attempt", "checkpoint", "end"} <= {event["kind"] for event in run.events}


def test_output_is_forwarded_with_the_rank_in_front(warm, capfd):
    warm.run(lambda: print("hello"))
    assert sorted(capfd.readouterr().out.splitlines()) == ["[rank 0] hello", "[rank 1] hello"]
