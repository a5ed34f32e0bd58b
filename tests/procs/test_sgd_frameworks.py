"""JAX models trained by DistributedSGD on real workers. Those of TensorFlow are in the example, since their workers
take long to start; replicas of both are in tests/unit/test_sgd_replicas.py."""

import numpy as np
import pytest
from sgd_rows import rows

from paceline import LocalEngine
from paceline.sgd import DistributedSGD

NUM_STEPS = 4


def line(worker_idx, device_idx):
    from sgd_jax_models import JaxLine

    return JaxLine(2 * worker_idx + device_idx)


def trained_on_all_rows():
    """Losses, and the weights in the end, by numpy: of the first replica's weights, with all rows in one batch."""
    inputs, targets = rows(0, 1)
    weights, bias = np.zeros((3, 1)), np.zeros(1)
    speeds, losses = [0.0, 0.0], []
    for _ in range(NUM_STEPS):
        error = inputs @ weights + bias - targets
        losses.append((error**2).mean())
        gradients = 2 * error.mean(0), 2 * inputs.T @ error / len(inputs)
        speeds = [0.9 * speed + gradient for speed, gradient in zip(speeds, gradients, strict=True)]
        bias, weights = bias - 0.1 * speeds[0], weights - 0.1 * speeds[1]
    return losses, {"b": bias, "line/w": weights}


@pytest.mark.parametrize("strategy", ["allreduce", "ps"])
def test_strategies_train_jax_models_as_one_on_all_rows(strategy):
    shape = {"num_workers": 2, "devices_per_worker": 2, "use_cpus": True}
    engine = LocalEngine(preload=["jax", "optax"])
    with DistributedSGD(line, **shape, strategy=strategy, engine=engine, verbose=False) as sgd:
        losses = [sgd.step() for _ in range(NUM_STEPS)]
        replicas = sgd.foreach_model(
            lambda model: [np.asarray(model.params["b"]), np.asarray(model.params["line"]["w"])]
        )
        made = sgd.get_weights()
    expected_losses, expected = trained_on_all_rows()
    assert [loss.metrics for loss in losses] == [{"num_rows": 4}] * NUM_STEPS
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert made.keys() == expected.keys()
    for name, weight in made.items():
        np.testing.assert_allclose(weight, expected[name], rtol=1e-5, atol=1e-6)
    assert len(replicas) == 4
    for replica in replicas:
        assert all(np.array_equal(one, made[name]) for one, name in zip(replica, ("b", "line/w"), strict=True))
