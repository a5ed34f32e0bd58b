"""Replicas of TensorFlow and JAX: what `Replica` promises, and what is particular to them. On workers:
tests/procs/test_sgd_frameworks.py."""

import numpy as np
import pytest

from paceline.errors import ArgumentError, ArgumentTypeError
from paceline.sgd import JaxModel, TFModel
from paceline.sgd.packing import Layout
from paceline.sgd.replica import replica_of

KINDS = ["jax", "tensorflow"]


def maker_of(kind):
    if kind == "jax":
        from sgd_jax_models import JaxLine

        return JaxLine
    from sgd_tf_models import TFLine

    if kind == "tensorflow":
        return TFLine
    import tf_keras

    return lambda *args: TFLine(*args, keras=tf_keras)


def means(replicas):
    """Those of their gradients, and the mean loss."""
    computed = [replica.compute() for replica in replicas]
    gradients = zip(*(one.gradients for one in computed), strict=True)
    mean = [None if parts[0] is None else np.mean(parts, axis=0) for parts in gradients]
    return np.mean([one.loss for one in computed]), mean


def check_replicas_train_as_one_model_on_all_rows(make):
    whole, *replicas = (replica_of(make(*part)) for part in [(0, 1), (0, 4), (1, 4), (2, 4), (3, 4)])
    for replica in replicas:
        assert Layout(tuple(replica.slots)) == Layout(tuple(whole.slots))
        replica.set_weights(whole.weights())
    for _ in range(3):
        loss, mean = means(replicas)
        for replica in replicas:
            replica.apply(mean)
        expected = whole.compute()
        whole.apply(expected.gradients)
        assert loss == pytest.approx(expected.loss, rel=1e-5)
    first, *others = (replica.weights() for replica in replicas)
    for name, weight in first.items():
        assert all(np.array_equal(weight, other[name]) for other in others)
        np.testing.assert_allclose(weight, whole.weights()[name], rtol=1e-5, atol=1e-6)


def check_state_holds_the_optimizer_and_goes_to_another_replica(make):
    one, other = replica_of(make(0, 1)), replica_of(make(0, 1))
    other.set_weights({name: np.ones_like(weight) for name, weight in one.weights().items()})
    one.apply(one.compute().gradients)
    other.load_state_dict(one.state_dict())
    for replica in (one, other):
        replica.apply(replica.compute().gradients)
    for name, weight in one.weights().items():
        np.testing.assert_array_equal(weight, other.weights()[name])


def check_applied_gradients_are_copied_and_weights_are_copies(make):
    replica = replica_of(make(0, 1))
    gradients = [None if one is None else one.copy() for one in replica.compute().gradients]
    kept = [None if one is None else one.copy() for one in gradients]
    replica.apply(gradients)
    weights = replica.weights()
    for array in [*weights.values(), *filter(lambda one: one is not None, gradients)]:
        array[...] = 7
    replica.apply(kept)
    assert all(np.isfinite(weight).all() and not (weight == 7).all() for weight in replica.weights().values())


def check_metrics_and_validation(make):
    replica = replica_of(make(0, 1))
    assert replica.compute().metrics == {"num_rows": 16}
    [value] = replica.validate().values()
    assert isinstance(value, float | np.floating)


def check_wrong_weights_and_states(make):
    replica = replica_of(make(0, 1))
    with pytest.raises(ArgumentError, match="unknown: more"):
        replica.set_weights({**replica.weights(), "more": np.ones(1)})
    with pytest.raises(ArgumentError, match="The state of the optimizer is not that of"):
        replica.load_state_dict({**replica.state_dict(), "optimizer": [np.ones(99)]})


# --- TensorFlow -------------------------------------------------------------------------------------------------------


def check_names_do_not_depend_on_what_the_process_has_made_before():
    from sgd_tf_models import TFLine

    first, second = (list(replica_of(TFLine(0)).weights()) for _ in range(2))
    assert first == second
    assert len({*first}) == 9
    assert "sequential/dense/kernel" in first
    assert "sequential/dense/kernel_1" in first


def check_weight_that_the_loss_does_not_depend_on_has_no_gradient():
    from sgd_tf_models import TFLine

    replica = replica_of(TFLine(0))
    gradients = {slot.name: gradient for slot, gradient in zip(replica.slots, replica.compute().gradients, strict=True)}
    assert gradients["unused"] is None
    replica.apply([gradients[slot.name] for slot in replica.slots])
    assert replica.weights()["unused"].tolist() == [1, 1]
    replica.apply([None] * len(replica.slots))


def check_object_of_any_class_with_variables_will_do():
    import tensorflow as tf

    class Embedded:
        def __init__(self):
            self.table = tf.Variable(tf.ones((5, 2), tf.float16))

        def get_loss(self):
            return tf.reduce_sum(tf.gather(self.table, [1, 3])), {"rows": 2}

        def get_optimizer(self):
            return tf.keras.optimizers.SGD(1.0)

    replica = replica_of(Embedded())
    assert [slot.dtype for slot in replica.slots] == ["float32"]
    computed = replica.compute()
    assert computed.metrics == {"rows": 2}
    assert computed.gradients[0].tolist() == [[0, 0], [1, 1], [0, 0], [1, 1], [0, 0]]
    replica.apply(computed.gradients)
    [weight] = replica.weights().values()
    assert weight.dtype == np.float16
    assert weight[:, 0].tolist() == [1, 0, 1, 0, 1]


def check_changed_learning_rate_goes_to_another_replica(make):
    one, other = replica_of(make(0, 1)), replica_of(make(0, 1))
    one.optimizer.learning_rate.assign(0.02)
    other.load_state_dict(one.state_dict())
    assert float(other.optimizer.learning_rate.numpy()) == pytest.approx(0.02)


def check_weights_that_nobody_would_train():
    import tensorflow as tf

    def dense():
        return tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(2)])

    class Model(TFModel):
        def __init__(self, hidden, weigh=lambda value: value):
            self.out, self.hidden, self.weigh = dense(), hidden, weigh

        def get_loss(self):
            value = tf.ones((1, 2))
            for layer in self.hidden if isinstance(self.hidden, list) else [self.hidden]:
                value = layer(value)
            return tf.reduce_sum(self.out(self.weigh(value)))

        def get_optimizer(self):
            return tf.keras.optimizers.SGD(0.1)

    class Head(Model):
        def get_variables(self):
            return self.out.variables

    for hidden in ([dense()], tf.keras.layers.Dense(2, name="late")):  # in no attribute; not built
        with pytest.raises(ArgumentTypeError, match=r"weights that nobody would train: .*kernel.* get_variables\(\)"):
            replica_of(Model(hidden)).compute()
    for model in (Model(dense()), Model([dense()], tf.stop_gradient), Head([dense()])):
        replica = replica_of(model)
        for _ in range(2):
            assert all(one is not None for one in replica.compute().gradients)


def check_tensorflow_models_that_cannot_be_trained():
    import tensorflow as tf

    class Model(TFModel):
        def __init__(self, layers=(), loss=lambda model: 0, optimizer=None):
            self.model = tf.keras.Sequential(list(layers))
            self.loss, self.optimizer = loss, optimizer or tf.keras.optimizers.SGD()

        def get_loss(self):
            return self.loss(self.model)

        def get_optimizer(self):
            return self.optimizer

    built = [tf.keras.Input((1,)), tf.keras.layers.Dense(1)]
    with pytest.raises(ArgumentTypeError, match=r"has no variables yet.*that is built"):
        replica_of(Model([tf.keras.layers.Dense(1)]))
    with pytest.raises(ArgumentTypeError, match=r"expected one of tf.keras.optimizers or tf_keras.optimizers"):
        replica_of(Model(built, optimizer=3))
    with pytest.raises(ArgumentTypeError, match=r"returned a tensor of shape \[2, 1\]; expected a tensor with one"):
        replica_of(Model(built, lambda model: model(tf.ones((2, 1))))).compute()
    for loss in (0.5, np.float32(0.5), (tf.constant(1.0), {}, 0.5)):
        with pytest.raises(ArgumentTypeError, match=r"has returned .*0\.5\)?; expected a tensor with one element, or"):
            replica_of(Model(built, lambda model, loss=loss: loss)).compute()
    with pytest.raises(ArgumentTypeError, match="depends on none of its weights"):
        replica_of(Model(built, lambda model: tf.constant(1.0))).compute()


# --- JAX --------------------------------------------------------------------------------------------------------------


def check_jax_model_without_optax():
    import jax.numpy as jnp

    class Plain:
        learning_rate = 0.5

        def __init__(self):
            self.params = [jnp.ones(2, jnp.bfloat16)]

        def loss_and_grad(self):
            return 1.0, [jnp.ones(2, jnp.bfloat16)], {"rows": jnp.array(2)}

    class Own(Plain):
        def apply_gradients(self, gradients):
            self.params = [self.params[0] + gradients[0]]

    for kind, expected in ((Plain, 0.5), (Own, 2.0)):
        replica = replica_of(kind())
        computed = replica.compute()
        assert (computed.loss, computed.metrics, computed.gradients[0].dtype) == (1.0, {"rows": 2}, np.float32)
        assert type(computed.metrics["rows"]) is int
        replica.apply(computed.gradients)
        assert replica.weights()["0"].astype(float).tolist() == [expected] * 2


def check_statistics_of_a_jax_model_are_part_of_its_state():
    from sgd_jax_models import Averaging

    one, other = replica_of(Averaging()), replica_of(Averaging())
    for _ in range(3):
        one.apply(one.compute().gradients)
    state = one.state_dict()
    one.compute()
    other.load_state_dict(state)
    assert other.model.mean.tolist() == [3, 3]
    other.apply(other.compute().gradients)
    np.testing.assert_array_equal(other.state_dict()["optimizer"][0], 4)
    other.model.set_state = None
    with pytest.raises(ArgumentError, match="besides optimizer, weights it has own, which is what its get_state"):
        other.load_state_dict(state)


def check_random_key_of_an_optimizer_is_part_of_its_state():
    import optax
    from sgd_jax_models import JaxLine

    class Noisy(JaxLine):
        def get_optimizer(self):
            return optax.chain(optax.add_noise(0.1, 0.5, 7), optax.sgd(0.1))

    check_state_holds_the_optimizer_and_goes_to_another_replica(Noisy)


def check_params_may_be_numbers_of_python():
    import jax
    import jax.numpy as jnp

    class Line(JaxModel):
        def __init__(self):
            self.params = {"slope": jnp.ones(2), "offset": 0.5}

        def loss_and_grad(self):
            return jax.value_and_grad(lambda params: params["slope"].sum() * params["offset"])(self.params)

    replica = replica_of(Line())
    replica.set_weights(replica.weights())
    replica.apply(replica.compute().gradients)
    assert {name: weight.tolist() for name, weight in replica.weights().items()} == {
        "offset": pytest.approx(0.48),
        "slope": [pytest.approx(0.995)] * 2,
    }


def check_weight_without_a_gradient_stays_when_others_have_one():
    from sgd_jax_models import JaxLine

    replica = replica_of(JaxLine(0))
    before = replica.weights()
    gradients = [None, *replica.compute().gradients[1:]]
    replica.apply(gradients)
    changed = [name for name, weight in replica.weights().items() if not np.array_equal(weight, before[name])]
    assert changed == ["line/w"]


def check_jax_models_that_cannot_be_trained():
    import jax.numpy as jnp
    import optax
    from flax import nnx

    class Model(JaxModel):
        def __init__(self, params, given=None, optimizer=None):
            self.params, self.given = params, given
            if optimizer is not None:
                self.get_optimizer = lambda: optimizer

        def loss_and_grad(self):
            return self.given

    class NoRate(Model):
        learning_rate = None

    params = {"w": jnp.ones(2)}
    with pytest.raises(ArgumentTypeError, match="params has no arrays"):
        replica_of(Model({}))
    for optimizer in (3, nnx.Optimizer(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), optax.sgd(0.1), wrt=nnx.Param)):
        with pytest.raises(ArgumentTypeError, match="expected one of optax"):
            replica_of(Model(params, optimizer=optimizer))
    with pytest.raises(ArgumentTypeError, match="neither get_optimizer"):
        replica_of(NoRate(params))
    with pytest.raises(ArgumentTypeError, match=r"has returned float; expected \(loss, gradients\)"):
        replica_of(Model(params, 1.0)).compute()
    with pytest.raises(ArgumentError, match=r"of shapes \[\(3,\)\]; expected .* params, .* of shapes \[\(2,\)\]"):
        replica_of(Model(params, (1.0, {"w": jnp.ones(3)}))).compute()
    with pytest.raises(ArgumentTypeError, match=r"as its loss; expected one number. Of value_and_grad"):
        replica_of(Model(params, ((1.0, {"accuracy": 1}), params))).compute()
    with pytest.raises(ArgumentTypeError, match="as its third value, has returned 3; expected a dict"):
        replica_of(Model(params, (1.0, params, 3))).compute()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "check",
    [
        check_replicas_train_as_one_model_on_all_rows,
        check_state_holds_the_optimizer_and_goes_to_another_replica,
        check_applied_gradients_are_copied_and_weights_are_copies,
        check_metrics_and_validation,
        check_wrong_weights_and_states,
    ],
    ids=lambda check: check.__name__,
)
def test_replica(check, kind):
    check(maker_of(kind))


def test_replica_of_tf_keras():
    check_state_holds_the_optimizer_and_goes_to_another_replica(maker_of("tf_keras"))


@pytest.mark.parametrize("kind", ["tensorflow", "tf_keras"])
def test_learning_rate_is_part_of_the_state(kind):
    check_changed_learning_rate_goes_to_another_replica(maker_of(kind))


@pytest.mark.parametrize(
    "check",
    [
        check_names_do_not_depend_on_what_the_process_has_made_before,
        check_weight_that_the_loss_does_not_depend_on_has_no_gradient,
        check_object_of_any_class_with_variables_will_do,
        check_weights_that_nobody_would_train,
        check_tensorflow_models_that_cannot_be_trained,
        check_jax_model_without_optax,
        check_statistics_of_a_jax_model_are_part_of_its_state,
        check_random_key_of_an_optimizer_is_part_of_its_state,
        check_params_may_be_numbers_of_python,
        check_weight_without_a_gradient_stays_when_others_have_one,
        check_jax_models_that_cannot_be_trained,
    ],
    ids=lambda check: check.__name__,
)
def test_what_is_particular(check):
    check()
