"""`ReportCallback` with Keras 3, in this process. With Keras 2, on workers: tests/procs/test_tensorflow.py."""

import gc
from types import SimpleNamespace

import numpy as np
import pytest

import paceline
from paceline import BackendConfig, Trainer
from paceline.data import from_numpy
from paceline.errors import ArgumentError, CheckpointError
from paceline.keras import ReportCallback, _build, _restore, _state, _tell_if_apart
from paceline.workers.base import Place

DATA = from_numpy(
    {
        "x": np.random.default_rng(0).normal(size=(32, 3)).astype("f4"),
        "y": np.random.default_rng(1).normal(size=32).astype("f4"),
    }
).random_shuffle()


@pytest.fixture(scope="module", autouse=True)
def keras():
    """Imported by the first test, not when tests are collected: it takes seconds, and more of them if the collector
    walks every half-imported module again and again."""
    gc.disable()
    try:
        return pytest.importorskip("keras")
    finally:
        gc.enable()


@pytest.fixture(scope="module")
def trainer():
    with Trainer(BackendConfig(), num_workers=0, logdir="keras_3") as made:
        yield made


def a_model(units=4, optimizer=None, metrics=(), is_built=True, **compiled):
    import keras

    keras.utils.set_random_seed(0)
    first = [keras.Input((3,))] if is_built else []
    model = keras.Sequential([*first, keras.layers.Dense(units), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
    model.compile(optimizer or keras.optimizers.Adam(0.05), "mse", metrics=[*metrics], **compiled)
    return model


def quickly_made(**options):
    """For tests that ask what the callback does and not what comes of the weights: to compile what they train takes
    most of their time."""
    return a_model(run_eagerly=True, **options)


def fit(config):
    """With a layer that draws, and an optimizer whose steps depend on their number."""
    import keras

    model, epochs = config.get("model", a_model)(), []

    def begin(epoch, logs):
        epochs.append(epoch)
        if epoch == config.get("fails_at"):
            raise ZeroDivisionError

    callbacks = [keras.callbacks.LambdaCallback(on_epoch_begin=begin), config.get("callback", ReportCallback)()]
    dataset = config.get("dataset", lambda one: one)(paceline.get_data_shard().to_tf("x", "y", batch_size=8))
    options = {"epochs": 3, "steps_per_epoch": config.get("steps"), "verbose": 0, "shuffle": False}
    model.fit(dataset, **options, callbacks=callbacks)
    return [one.tolist() for one in model.get_weights()], int(model.optimizer.iterations.numpy()), epochs


@pytest.fixture(scope="module")
def failed(trainer):
    """The path of the checkpoint of a run that ended before its last epoch."""
    with pytest.raises(ZeroDivisionError):
        trainer.run(fit, {"fails_at": 2}, dataset=DATA)
    return trainer.latest_checkpoint_path


def test_fit_that_goes_on_ends_as_one_that_was_not_disturbed(trainer, failed):
    [(weights, count, epochs)] = trainer.run(fit, {}, dataset=DATA)
    assert (count, epochs) == (12, [0, 1, 2])
    assert paceline.load_run(trainer.latest_run_dir).metrics["epoch"].tolist() == [0, 1, 2]
    assert trainer.run(fit, {}, dataset=DATA, checkpoint=failed) == [(weights, count, [2])]


def repeated(dataset):
    return dataset.repeat()


def counted(dataset):
    import tensorflow as tf

    return dataset.apply(tf.data.experimental.assert_cardinality(4))


@pytest.fixture(scope="module")
def undisturbed(trainer):
    """What `fit` gives that knows how many batches an epoch has."""
    return trainer.run(fit, {"dataset": counted}, dataset=DATA)


@pytest.mark.parametrize("how", [{"dataset": repeated, "steps": 4}, {"dataset": counted}], ids=["repeated", "counted"])
def test_keras_may_be_told_how_many_batches_an_epoch_has(trainer, undisturbed, how):
    """Then it never asks for more than these."""
    with pytest.raises(ZeroDivisionError):
        trainer.run(fit, {**how, "fails_at": 2}, dataset=DATA)
    found = trainer.run(fit, how, dataset=DATA, checkpoint=trainer.latest_checkpoint_path, record_ids=True)
    assert found == [(weights, count, [2]) for weights, count, _ in undisturbed]
    epoch = paceline.data.audit(trainer.latest_run_dir).epochs[-1]
    assert (epoch.state, epoch.once) == ("finished, begun in another run", 32)


def test_callback_that_does_not_save_does_not_go_on_either(trainer, failed):
    config = {"callback": lambda: ReportCallback(save=False, every=2)}
    [(_, _, epochs)] = trainer.run(fit, config, dataset=DATA, checkpoint=failed)
    assert epochs == [0, 1, 2]
    metrics = paceline.load_run(trainer.latest_run_dir).metrics
    assert metrics["batch"].dropna().tolist() == [2, 4] * 3


def test_second_fit_of_a_function_begins_anew(trainer):
    config = {"model": quickly_made}
    [(_, _, first), (_, _, second)] = trainer.run(lambda config: [fit(config), fit(config)], config, dataset=DATA)[0]
    assert first == second == [0, 1, 2]


def test_callback_of_the_script_goes_on_in_every_run(trainer, failed):
    """In this process, all runs have the same object."""
    callback = ReportCallback()
    config = {"model": quickly_made, "callback": lambda: callback}
    trainer.run(fit, config, dataset=DATA)
    [(_, _, epochs)] = trainer.run(fit, config, dataset=DATA, checkpoint=failed)
    assert epochs == [2]


def test_optimizer_that_gathers_gradients_goes_on_with_those_it_has(trainer):
    """Of three batches at a time, and an epoch has four."""

    def model():
        import keras

        return a_model(optimizer=keras.optimizers.Adam(0.05, gradient_accumulation_steps=3))

    [(weights, count, epochs)] = trainer.run(fit, {"model": model}, dataset=DATA)
    assert (count, epochs) == (4, [0, 1, 2])
    with pytest.raises(ZeroDivisionError):
        trainer.run(fit, {"model": model, "fails_at": 2}, dataset=DATA)
    found = trainer.run(fit, {"model": model}, dataset=DATA, checkpoint=trainer.latest_checkpoint_path)
    assert found == [(weights, count, [2])]


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([10, 11, 12, 13], 13),
        ([10, 11, 12, 14], 13),
        ([10, 12, 14, 18], 16),
        ([10, 10, 10, 13], 13),
        ([10, 11, 11, 12], 12),
    ],
    ids=["once each batch", "and at the end of the data", "twice each batch, too", "shown at the end", "now and then"],
)
def test_only_a_step_without_data_is_taken_back(counts, expected):
    """`counts`: what the optimizer shows before an epoch of three batches, after two of these, and at its end."""
    import keras

    model, callback = a_model(optimizer=keras.optimizers.SGD()), ReportCallback(save=False)
    count = model.optimizer.iterations
    callback.set_model(model)
    callback.set_params({"steps": None})
    callback.on_train_begin()
    count.assign(counts[0])
    callback.on_epoch_begin(0)
    for batch, now in enumerate([*counts[1:3], counts[2]]):
        count.assign(now)
        callback.on_train_batch_end(batch, {})
    count.assign(counts[3])
    callback.on_epoch_end(0, {})
    assert int(count.numpy()) == expected


def test_metric_of_several_numbers_is_reported_as_an_array(trainer):
    def model():
        import keras

        class Bounds(keras.metrics.Metric):
            def update_state(self, *args, **kwargs):
                pass

            def result(self):
                return keras.ops.convert_to_tensor([1.0, 2.0])

        return a_model(metrics=[Bounds(name="bounds")])

    trainer.run(fit, {"model": model}, dataset=DATA)
    metrics = paceline.load_run(trainer.latest_run_dir).metrics
    assert [[*one] for one in metrics["bounds"]] == [[1.0, 2.0]] * 3
    assert metrics["loss"].dtype == float


def test_optimizer_of_an_older_keras_is_restored():
    import tf_keras

    def model():
        made = tf_keras.Sequential([tf_keras.layers.Dense(1, input_shape=(3,))])
        made.compile(tf_keras.optimizers.legacy.Adam(0.05), "mse")
        return made

    one, other = model(), model()
    one.fit(np.ones((8, 3), "f4"), np.ones(8, "f4"), epochs=2, verbose=0)
    _restore(other, _state(one))
    assert int(other.optimizer.iterations.numpy()) == 2
    for ours, theirs in zip(other.optimizer.get_weights(), one.optimizer.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


OPTIMIZERS = {
    "keras 3": lambda keras, tf_keras: keras.optimizers.Adam(0.05),
    "keras 2": lambda keras, tf_keras: tf_keras.optimizers.Adam(0.05),
    "older": lambda keras, tf_keras: tf_keras.optimizers.legacy.Adam(0.05),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_learning_rate_that_callbacks_have_changed_is_restored(kind):
    """As LearningRateScheduler does, from what it finds. Keras 2 has it apart from what else an optimizer has."""
    import keras
    import tf_keras

    def model():
        package = keras if kind == "keras 3" else tf_keras
        made = package.Sequential([package.Input((3,)), package.layers.Dense(1)])
        made.compile(OPTIMIZERS[kind](keras, tf_keras), "mse")
        _build(made.optimizer, made.trainable_variables)
        return made

    one, other = model(), model()
    one.optimizer.learning_rate.assign(0.01)
    state = _state(one)
    _restore(other, state)
    assert float(other.optimizer.learning_rate.numpy()) == pytest.approx(0.01)
    without = {name: value for name, value in state.items() if name != "learning_rate"}
    _restore(other, without)  # of a checkpoint from before


def test_schedule_of_the_learning_rate_goes_on_by_the_count():
    import tf_keras

    def model():
        made = tf_keras.Sequential([tf_keras.layers.Dense(1, input_shape=(3,))])
        schedule = tf_keras.optimizers.schedules.ExponentialDecay(0.05, 1, 0.5)
        made.compile(tf_keras.optimizers.SGD(schedule), "mse")
        return made

    one, other = model(), model()
    rows = np.ones((8, 3), "f4"), np.ones(8, "f4")
    one.fit(*rows, epochs=2, verbose=0)
    _restore(other, _state(one))
    for made in (one, other):
        made.fit(*rows, verbose=0)
    np.testing.assert_array_equal(one.get_weights()[0], other.get_weights()[0])


def test_more_may_be_in_the_checkpoint(trainer):
    config = {"model": quickly_made, "callback": lambda: ReportCallback(also=lambda: {"mood": "good"})}
    trainer.run(fit, config, dataset=DATA)
    checkpoint = paceline.read_checkpoint(trainer.latest_checkpoint_path)
    assert (checkpoint["mood"], checkpoint["keras"]["epoch"]) == ("good", 2)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: a_model(units=5), r"other weights of the model than there are: .*\(3, 4\).* here"),
        (lambda: a_model(is_built=False), "no weights yet into which a checkpoint could be loaded"),
    ],
)
def test_checkpoint_does_not_fit_the_model(trainer, failed, model, message):
    with pytest.raises(CheckpointError, match=message):
        trainer.run(fit, {"model": model}, dataset=DATA, checkpoint=failed)


def test_model_that_no_checkpoint_could_be_loaded_into_is_told_at_the_start(trainer, caplog):
    """Not only after a kill, when all is lost."""
    trainer.run(fit, {"model": lambda: quickly_made(is_built=False)}, dataset=DATA)
    assert [one.message for one in caplog.records if "call model.build" in one.message] != []


@pytest.mark.parametrize("every", [0, -1, True, "2"])
def test_every_is_a_number_of_batches(every):
    with pytest.raises(ArgumentError, match="expected a whole number of batches, at least 1"):
        ReportCallback(every=every)


def test_workers_that_train_a_model_each_are_told_of(caplog):
    def tell(num_replicas, rank=0):
        caplog.clear()
        strategy = None if num_replicas is None else SimpleNamespace(num_replicas_in_sync=num_replicas)
        _tell_if_apart(SimpleNamespace(distribute_strategy=strategy), Place(rank, rank, 0, 2, 2))
        return caplog.text

    assert "2 workers each train a model of their own" in tell(1)
    assert tell(2) == tell(None) == tell(1, rank=1) == ""
