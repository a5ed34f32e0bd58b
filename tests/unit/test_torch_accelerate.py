"""What Accelerate remembers of a process is that of one run."""

from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState

from paceline import Trainer


def remember(precision):
    return Accelerator(mixed_precision=precision, cpu=True).mixed_precision


def run(precision):
    with Trainer(num_workers=0, logdir="accelerate") as trainer:
        return trainer.run(lambda: remember(precision))


def test_run_leaves_nothing_to_the_next():
    assert run("no") == ["no"]
    assert (PartialState._shared_state, AcceleratorState._shared_state) == ({}, {})
    assert run("bf16") == ["bf16"]


def test_accelerate_that_remembers_otherwise_is_left_alone(monkeypatch):
    monkeypatch.setattr(PartialState, "_shared_state", None)
    monkeypatch.delattr(AcceleratorState, "_shared_state")
    with Trainer(num_workers=0, logdir="accelerate") as trainer:
        assert trainer.run(lambda: "trained") == ["trained"]


def test_what_was_there_before_a_run_is_there_after_it():
    remember("no")
    before = dict(AcceleratorState._shared_state)

    def change():
        AcceleratorState._reset_state(reset_partial_state=True)
        return remember("bf16")

    try:
        with Trainer(num_workers=0, logdir="accelerate") as trainer:
            assert trainer.run(change) == ["bf16"]
        assert AcceleratorState._shared_state == before
        assert remember("no") == "no"
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
