"""What the TensorFlow backend tells TensorFlow in a worker. Groups are in tests/procs and tests/contract."""

import pytest

from paceline.backends import tensorflow as backend
from paceline.workers.base import Place


@pytest.fixture(scope="module")
def tf():
    """Imported by the first test, not when tests are collected: it takes seconds."""
    import tensorflow

    return tensorflow


@pytest.mark.parametrize(("num_visible", "own"), [(2, ["GPU 1"]), (4, ["GPU 2", "GPU 3"])], ids=["one", "two"])
def test_worker_sees_no_gpu_but_its_own(tf, monkeypatch, num_visible, own):
    """What the second of two workers tells TensorFlow. There is none here."""
    told = []
    monkeypatch.setattr(
        tf.config, "list_physical_devices", lambda kind: [f"{kind} {index}" for index in range(num_visible)]
    )
    monkeypatch.setattr(tf.config, "set_visible_devices", lambda own, kind: told.append(("visible", own)))
    monkeypatch.setattr(tf.config.experimental, "set_memory_growth", lambda *gpu: told.append(("grows", *gpu)))
    backend._choose_gpus(Place(1, 1, 0, 2, 2, device_index=num_visible // 2), memory_growth=True)
    assert told == [("visible", own), *(("grows", gpu, True) for gpu in own)]
