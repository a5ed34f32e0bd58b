"""DistributedSGD on a Ray cluster: the same as on this machine, and through Ray's object store."""

import os
import signal

import numpy as np
import pytest
from sgd_models import Line, creator, digest, whole

import paceline
from paceline.sgd import DistributedSGD

pytestmark = pytest.mark.usefixtures("ray_cluster")


def on_ray(creator, strategy, **more):
    return DistributedSGD(
        creator, 2, use_cpus=True, strategy=strategy, verbose=False, engine="ray", cpus_per_worker=1, **more
    )


@pytest.mark.parametrize("strategy", ["allreduce", "ps"])
def test_training_and_a_killed_worker(strategy):
    with on_ray(creator(1), strategy) as sgd:
        for number in range(3):
            if number == 2:
                os.kill(sgd.foreach_worker(lambda models: os.getpid())[1], signal.SIGKILL)
            sgd.step()
        assert len(set(sgd.foreach_model(digest))) == 1
        weights = sgd.get_weights()
    for name, value in whole(3).items():
        np.testing.assert_allclose(weights[name], value, rtol=1e-5, atol=1e-6)
    assert paceline.load_run(sgd.run_dir).status.state == "SUCCEEDED"


@pytest.mark.parametrize("strategy", ["ps", "simple"])
def test_without_shared_memory(strategy):
    """As on several machines."""
    sgd = on_ray(lambda worker: Line(worker), strategy)
    sgd._team.shares_memory = False
    with sgd:
        sgd.step()
        weights = sgd.foreach_model(lambda model: model.weights["slope"].tolist())
    assert weights == [[pytest.approx(0.9)] * 3] * 2
