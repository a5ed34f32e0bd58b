"""What the TensorFlow backend tells TensorFlow in a worker. Groups are in tests/procs and tests/contract."""

import pytest

from paceline.backends import tensorflow as backend


@pytest.fixture(scope="module")
def tf():
    """Imported by the first test, not when tests are collected: it takes seconds."""
    import tensorflow

    return tensorflow


@pytest.mark.parametrize(
    ("index", "expected"),
    [(None, [("visible", [])]), (1, [("visible", ["GPU 1"]), ("grows", "GPU 1", True)])],
    ids=["without", "its own"],
)
def test_worker_sees_no_gpu_but_its_own(tf, monkeypatch, index, expected):
    """What TensorFlow is told where there are two. There is none here."""
    told = []
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [f"{kind} 0", f"{kind} 1"])
    monkeypatch.setattr(tf.config, "set_visible_devices", lambda own, kind: told.append(("visible", own)))
    monkeypatch.setattr(tf.config.experimental, "set_memory_growth", lambda *gpu: told.append(("grows", *gpu)))
    backend._choose_gpu(index, memory_growth=True)
    assert told == expected
