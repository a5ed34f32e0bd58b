"""Scripts for TensorFlow on real workers: `fit`, what the data becomes of a strategy, and what a script may set up."""

import json
import os
import signal

import numpy as np
import pytest

import paceline
from paceline import TensorflowConfig, Trainer
from paceline.data import from_numpy
from paceline.errors import ArgumentError
from paceline.workers.base import Raised

EPOCHS, ROWS = 4, 48
DATA = from_numpy(
    {
        "id": np.arange(ROWS),
        "x": np.random.default_rng(0).normal(size=(ROWS, 3)).astype("f4"),
        "y": np.random.default_rng(1).normal(size=ROWS).astype("f4"),
    }
).random_shuffle(seed=1)


@pytest.fixture(scope="module")
def warm(lasts):
    with Trainer("tensorflow", 2, engine="local", logdir="tensorflow") as trainer, lasts(trainer):
        yield trainer


def fit(config):
    """With Adam, whose steps depend on their number, and a fit that does not know how many batches there are."""
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    shard = paceline.get_data_shard()
    with strategy.scope():
        tf.keras.utils.set_random_seed(0)
        model = tf.keras.Sequential([tf.keras.layers.Dense(4, input_shape=(3,)), tf.keras.layers.Dense(1)])
        model.compile(tf.keras.optimizers.Adam(0.05), "mse")
    epochs = []
    hook = tf.keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: epochs.append(epoch),
        on_batch_end=lambda batch, logs: config["hook"](epochs[-1]),
    )
    callbacks = [hook, paceline.keras.ReportCallback(every=2)]
    model.fit(shard.to_tf("x", "y", batch_size=8), epochs=EPOCHS, verbose=0, callbacks=callbacks)
    weights = np.concatenate([one.ravel() for one in model.get_weights()]).tolist()
    return weights, int(model.optimizer.iterations.numpy()), epochs, shard.epoch


def reported(trainer, rank=0):
    frame = paceline.load_run(trainer.latest_run_dir).metrics
    return frame[frame["rank"] == rank]


def test_fit_that_loses_a_worker_ends_as_one_that_does_not(warm, tmp_path):
    def kill_once(epoch):
        if epoch == 2 and paceline.world_rank() == 1 and not (tmp_path / "killed").exists():
            (tmp_path / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    undisturbed = warm.run(fit, {"hook": lambda epoch: None}, dataset=DATA)
    before = [info.pid for info in warm._crew.ensure().infos]
    assert undisturbed[0] == undisturbed[1]
    weights, count, epochs, epoch_of_data = undisturbed[0]
    assert (count, epochs, epoch_of_data) == (6 * EPOCHS, [0, 1, 2, 3], EPOCHS)
    frame = reported(warm)
    assert frame[frame["batch"].isna()]["epoch"].tolist() == [0, 1, 2, 3]
    assert frame["batch"].dropna().tolist() == [2, 4, 6] * EPOCHS
    np.testing.assert_allclose(frame[frame["batch"] == 6]["loss"], frame[frame["batch"].isna()]["loss"], rtol=1e-6)

    warm.run(lambda: None)
    assert [info.pid for info in warm._crew.ensure().infos] == before, "what TensorFlow has generated is nobody's edit"
    resumed = warm.run(fit, {"hook": kill_once}, dataset=DATA)
    assert (tmp_path / "killed").exists()
    assert resumed[0] == resumed[1] == (weights, count, [2, 3], EPOCHS)
    again = reported(warm)
    assert again[again["batch"].isna()]["loss"].tolist() == frame[frame["batch"].isna()]["loss"].tolist()
    state = paceline.read_checkpoint(warm.latest_checkpoint_path)["keras"]
    assert state["epoch"] == EPOCHS - 1
    assert np.concatenate([one.ravel() for one in state["weights"]]).tolist() == weights


def test_rows_of_a_strategy_are_those_of_the_shard(warm):
    """Whether TensorFlow distributes the dataset, and cuts its batches, or is given what the shard gives."""

    def read():
        import tensorflow as tf

        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        made = paceline.get_data_shard().to_tf("x", "id", batch_size=8)
        given = strategy.distribute_datasets_from_function(lambda context: made)
        distributed = strategy.experimental_distribute_dataset(made)
        return [
            [[int(number) for number in strategy.experimental_local_results(ids)[0]] for _, ids in dataset]
            for dataset in (made, given, distributed)
        ]

    zero, one = warm.run(read, dataset=DATA)
    for mine, others in zip(zero, one, strict=True):
        assert sorted(number for ids in mine + others for number in ids) == [*range(ROWS)]
    assert [[len(ids) for ids in epoch] for epoch in zero] == [[8] * 3, [8] * 3, [4] * 6]


def test_worker_knows_its_cluster_and_may_set_up_tensorflow_before_it_joins(warm):
    def look():
        import tensorflow as tf

        tf.config.threading.set_inter_op_parallelism_threads(3)  # refused once TensorFlow is initialised
        return json.loads(os.environ["TF_CONFIG"]), os.environ["TF_USE_LEGACY_KERAS"], tf.keras.layers.Dense.__module__

    warm.shutdown()
    zero, one = warm.run(look)
    assert zero[0]["cluster"] == one[0]["cluster"]
    assert len({*zero[0]["cluster"]["worker"]}) == 2
    assert [told[0]["task"] for told in (zero, one)] == [{"type": "worker", "index": 0}, {"type": "worker", "index": 1}]
    assert zero[1:] == ("1", "tf_keras.src.layers.core.dense")


def test_workers_that_have_used_tensorflow_without_the_group_are_renewed(warm):
    """A strategy for several workers has to be made before anything else."""

    def add():
        import tensorflow as tf

        return int(tf.constant(1) + 1), os.getpid()

    def join():
        import tensorflow as tf

        return tf.distribute.MultiWorkerMirroredStrategy().num_replicas_in_sync, os.getpid()

    warm.shutdown()
    [(two, first), _] = warm.run(add)
    [(size, second), _] = warm.run(join)
    assert (two, size) == (2, 2)
    assert first != second


def test_inline_leaves_the_process_alone():
    with Trainer("tensorflow", num_workers=0) as trainer:
        assert trainer.run(lambda: os.environ.get("TF_CONFIG")) == [None]
        assert trainer.run(lambda: paceline.world_size()) == [1]


@pytest.mark.parametrize("value", [0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["timeout_s", "heartbeat_timeout_s"])
def test_times_are_positive(name, value):
    with pytest.raises(ArgumentError, match=rf"TensorflowConfig\({name}={value}\): expected a positive number"):
        TensorflowConfig(**{name: value})


@pytest.mark.parametrize(
    ("type_name", "message", "is_echo"),
    [
        ("UnavailableError", "Collective ops is aborted by: Error reported from /job:worker/task:1: …", True),
        ("InternalError", "From /job:worker/replica:0/task:0: Socket closed", True),
        ("InternalError", "libdevice not found", False),
        ("InvalidArgumentError", "Collective ops got other shapes", False),
        ("ValueError", "heartbeat", False),
    ],
)
def test_what_is_the_echo_of_another_rank(type_name, message, is_echo):
    assert TensorflowConfig().is_broken_collective(Raised(0, type_name, message, "")) is is_echo
