"""A DistributedSGD in this very process: beside others, and beside what the program itself does."""

import json
import sys

import numpy as np
import pytest

import paceline
from paceline import session
from paceline.data import from_numpy
from paceline.data.given import Supply
from paceline.errors import ArgumentError, MissingDependencyError, PacelineError, TrainFunctionError
from paceline.sgd import DistributedSGD, NumpyModel
from paceline.testing import ScriptedEngine


class Reader(NumpyModel):
    """Asks for its data when it needs it, and has gradients of nothing."""

    learning_rate = 0.1

    def __init__(self):
        self.weights, self.seen, self.batches = {"w": np.zeros(1)}, [], None

    def loss_and_grad(self):
        if self.batches is None:
            self.batches = iter(paceline.get_data_shard().iter_batches(2))
        self.seen.append(next(self.batches)["x"].tolist())
        return 0.0, {"w": np.zeros(1)}


class Chatty(Reader):
    """As a model does that was once a training function."""

    def loss_and_grad(self):
        paceline.report(loss=1.0)
        paceline.save_checkpoint(w=1)
        return 0.0, {"w": np.zeros(1)}


def here(model=Reader, first=0, **more):
    data = from_numpy({"x": np.arange(first, first + 20)})
    return DistributedSGD(model, num_workers=0, use_cpus=True, verbose=False, dataset=data, **more)


def test_each_of_two_has_its_own_data_and_position():
    with here(first=0) as one, here(first=100) as two:
        for sgd in (one, two, one):
            sgd.step()
        assert one.for_model(lambda model: model.seen) == [[0, 1], [2, 3]]
        assert two.for_model(lambda model: model.seen) == [[100, 101]]
        states = one.state_dict(), two.state_dict()
    for first, state, following in ((0, states[0], [4, 5]), (100, states[1], [102, 103])):
        with here(first=first) as sgd:
            sgd.load_state_dict(state)
            sgd.step()
            assert sgd.for_model(lambda model: model.seen) == [following]


class Walker(NumpyModel):
    """Where it is, is an array."""

    learning_rate = 0.1

    def __init__(self):
        self.weights, self.place = {"w": np.zeros(1)}, np.zeros(2)

    def loss_and_grad(self):
        self.place = self.place + np.array([1, 2])
        return 0.0, {"w": np.zeros(1)}

    def get_position(self):
        return self.place

    def set_position(self, position):
        self.place = position


def test_model_that_is_brought_here_is_a_copy():
    """As from workers: later steps leave it alone, and it has to travel."""

    class Looping(Walker):
        def loss_and_grad(self):
            self.rows = (row for row in "ab")
            return super().loss_and_grad()

    with DistributedSGD(Walker, num_workers=0, use_cpus=True, verbose=False) as sgd:
        sgd.step()
        model = sgd.get_model()
        sgd.step()
        assert (type(model), model.place.tolist()) == (Walker, [1, 2])
    with DistributedSGD(Looping, num_workers=0, use_cpus=True, verbose=False) as sgd:
        sgd.step()
        with pytest.raises(TrainFunctionError, match="cannot be pickled") as caught:
            sgd.get_model()
        assert "take get_weights()" in caught.value.__notes__[0]
        sgd.step()


def test_position_may_be_an_array():
    with DistributedSGD(Walker, num_workers=0, use_cpus=True, verbose=False) as sgd:
        sgd.step()
        state = sgd.state_dict()
    with DistributedSGD(Walker, num_workers=0, use_cpus=True, verbose=False) as sgd:
        sgd.load_state_dict(state)
        sgd.step()
        assert sgd.for_model(lambda model: model.place.tolist()) == [2, 4]


def test_state_stays_as_it_is_while_training_goes_on():
    """A model may change what it has given, or was given, as its position."""

    class Counting(Walker):
        def loss_and_grad(self):
            self.place += 1
            return 0.0, {"w": np.zeros(1)}

    with DistributedSGD(Counting, num_workers=0, use_cpus=True, verbose=False) as sgd:
        sgd.step()
        state = sgd.state_dict()
        for _ in range(2):
            sgd.step()
            sgd.load_state_dict(state)
            assert sgd.for_model(lambda model: model.place.tolist()) == [1, 1]


def test_metric_that_is_called_loss_is_not_the_loss(tmp_path):
    """What `step` returns is what the curve has, and what ranks checkpoints."""

    class Named(Reader):
        def loss_and_grad(self):
            return 1.0, {"w": np.zeros(1)}, {"loss": 5.0, "other": 2.0}

    with DistributedSGD(Named, 0, use_cpus=True, verbose=False, logdir=tmp_path) as sgd:
        result = sgd.step()
    row = json.loads((sgd.run_dir / "metrics.jsonl").read_text())
    assert (result["loss"], row["ranks"][0]["loss"], row["ranks"][0]["other"]) == (1.0, 1.0, 2.0)


def test_between_steps_the_program_is_in_no_run_of_its():
    with here() as sgd:
        sgd.step()
        assert not paceline.in_worker()
        assert session.current() is None
        assert sgd.for_model(lambda model: paceline.in_worker())


def test_what_a_model_reports_or_saves_by_itself_is_in_nobodys_way(caplog):
    with here(Chatty) as sgd:
        for _ in range(2):
            sgd.step()
        path = sgd.save_checkpoint()
    said = [record.message.partition(" in a model")[0] for record in caplog.records]
    assert said == ["report()", "save_checkpoint()"]
    assert paceline.read_checkpoint(path)["step"] == 2
    assert len(paceline.load_run(sgd.run_dir).metrics) == 2


def test_without_torch_another_strategy_is_named(monkeypatch):
    """When it is made, and not when its workers are."""
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingDependencyError, match="needs the package 'torch'") as caught:
        DistributedSGD(Reader, 2, use_cpus=True, engine=ScriptedEngine([]))
    assert caught.value.__notes__ == ["strategy='allreduce' is made of torch's collectives; 'ps' needs none."]
    DistributedSGD(Reader, 2, use_cpus=True, strategy="ps", engine=ScriptedEngine([]))


@pytest.mark.parametrize("error", [None, ValueError()], ids=repr)
def test_streams_of_the_data_end_with_the_run(monkeypatch, error):
    """Those of Ray: nobody else would end them."""
    ended = []
    monkeypatch.setattr(Supply, "close", lambda self: ended.append(self))
    sgd = here()
    sgd.step()
    sgd.__exit__(None if error is None else type(error), error, None)
    assert ended == [sgd._team._request.dataset]


def test_data_that_these_workers_cannot_read(monkeypatch):
    monkeypatch.setattr(Supply, "engine", "ray")
    data = from_numpy({"x": np.arange(4)})
    with pytest.raises(ArgumentError, match=r"engine='ray' only, and the workers would live on 'local'"):
        DistributedSGD(Reader, 2, use_cpus=True, dataset=data, engine="local")


@pytest.mark.parametrize(
    ("error", "state"),
    [(SystemExit(0), "SUCCEEDED"), (SystemExit(), "SUCCEEDED"), (SystemExit(3), "FAILED"), (ValueError(), "FAILED")],
    ids=repr,
)
def test_how_the_block_is_left(error, state):
    sgd = here()

    def script():
        with sgd:
            raise error

    with pytest.raises(type(error)):
        script()
    assert paceline.load_run(sgd.run_dir).status.state == state


@pytest.mark.parametrize(("is_prompt", "state"), [(False, "FAILED"), (True, "SUCCEEDED")])
def test_program_ends_after_an_error(monkeypatch, is_prompt, state):
    """A script has ended by it. At a prompt, and in a notebook, it was some line before, and the program went on."""
    monkeypatch.setattr(sys, "last_value", NameError("oh"), raising=False)
    if is_prompt:
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    sgd = here()
    sgd.step()
    sgd._life.end_with_program()
    assert paceline.load_run(sgd.run_dir).status.state == state


def test_question_that_nobody_answers_is_refused():
    """It would be waited for without end."""
    with here() as sgd, pytest.raises(PacelineError, match="nobody knows an answer to 'put'"):
        sgd.for_model(lambda model: session.current().put("name", "text"))
