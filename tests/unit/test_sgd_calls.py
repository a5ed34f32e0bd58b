"""Calls of a DistributedSGD that cannot work, in this process: while another is going on, or with what is no state."""

import signal
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import paceline
from paceline.control.termination import Signals
from paceline.errors import ArgumentError, ArgumentTypeError, TrainerStateError
from paceline.sgd import DistributedSGD, NumpyModel, TorchModel, life, team
from paceline.sgd.life import Life
from paceline.sgd.link import BUSY_S
from paceline.sgd.team import Team


class Falling(NumpyModel):
    def __init__(self):
        self.weights = {"w": np.zeros(1)}

    def loss_and_grad(self):
        return 1.0, {"w": np.ones(1)}

    def validate(self):
        return {}


def here(model=Falling, **more):
    return DistributedSGD(lambda: model(), num_workers=0, use_cpus=True, verbose=False, **more)


def state_of(sgd):
    return paceline.load_run(sgd.run_dir).status.state


class MutableError(Exception):
    def __str__(self):
        raise RuntimeError("not even a message")


def test_an_exception_whose_message_cannot_be_had():
    class Raising(Falling):
        def loss_and_grad(self):
            raise MutableError

    sgd = here(Raising)
    with pytest.raises(MutableError):
        sgd.step()
    assert state_of(sgd) == "FAILED"


def test_handler_raises_again_on_the_way_to_the_end(monkeypatch):
    rung = []

    class Ringing(Signals):
        def __init__(self):
            rung.append(None)
            if len(rung) == 1:
                raise TimeoutError("the second")
            super().__init__()

    sgd = here()
    sgd.step()
    monkeypatch.setattr(life, "Signals", Ringing)
    with pytest.raises(TimeoutError, match="the second"):
        sgd.foreach_model(lambda model: (_ for _ in ()).throw(KeyboardInterrupt))
    assert (state_of(sgd), len(rung)) == ("STOPPED", 2)


def test_state_that_has_more_than_this_model_takes():
    """As of a model with another optimizer, whose weights have the same names."""
    with here() as sgd:
        state = sgd.state_dict()
        more = {**state, "replica": {**state["replica"], "optimizer": [np.ones(1)]}, "step": 5}
        with pytest.raises(ArgumentError, match="not that of Falling: besides weights it has optimizer"):
            sgd.load_state_dict(more)
        assert sgd.step().step == 1


@pytest.mark.parametrize("given", [[1, 2], None, "w"])
def test_weights_that_have_no_names(given):
    with here() as sgd, pytest.raises(ArgumentTypeError, match="expected a dict of arrays by name"):
        sgd.set_weights(given)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (np.zeros(2), "are of type ndarray; expected a dict or a list of arrays, also if there is only one"),
        (0.5, "are of type float; expected a dict or a list"),
        ({"layer": {"w": np.zeros(1)}}, r"weight layer of .*Formed is of type dict; expected an array of numbers"),
        ({"w": [[1.0], [1.0, 2.0]]}, r"weight w of .*Formed is of type list; expected an array of numbers"),
    ],
    ids=["a lone array", "a number", "nested", "ragged"],
)
def test_weights_that_are_no_arrays(weights, message):
    """They would come back in another form than the model has them in."""

    class Formed(Falling):
        def __init__(self):
            self.weights = weights

    with pytest.raises(ArgumentTypeError, match=message):
        here(Formed).step()


class Descent(torch.optim.Optimizer):
    """As one writes it: torch's own have more options."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                weight -= group["lr"] * weight.grad


class Descending(TorchModel):
    def __init__(self):
        self.module = torch.nn.Linear(1, 1)

    def get_loss(self):
        return self.module(torch.ones(1, 1)).sum()

    def get_optimizer(self):
        return Descent(self.module.parameters(), lr=0.5)


def test_optimizer_of_the_user_s_own():
    with here(Descending) as sgd:
        before = sgd.get_weights()["bias"]
        sgd.step()
        for _ in range(2):
            sgd.load_state_dict(sgd.state_dict())
        sgd.step()
        assert (sgd.get_weights()["bias"] - before).tolist() == pytest.approx([-1.0])
        state = sgd.state_dict()
        state["replica"]["optimizer"]["param_groups"][0].pop("lr")
        with pytest.raises(ArgumentError, match="not that of Descent: it has no lr"):
            sgd.load_state_dict(state)


@pytest.mark.parametrize("given", ["5", True, [1]])
def test_timeout_that_is_no_number(given):
    with pytest.raises(ArgumentTypeError, match="expected a number of seconds"):
        here(hang_timeout_s=given)


def test_who_is_hurried(monkeypatch):
    """What is ours has to be answered in time; what is a user's may take as long as it likes."""
    with here(hang_timeout_s=5.0) as sgd:
        link, waited = sgd._team.link, []
        for name in ("call", "ask_each"):
            act = getattr(link, name)
            noted = lambda *args, act=act, **more: (waited.append(link.patience_s), act(*args, **more))[1]  # noqa: E731
            monkeypatch.setattr(link, name, noted)
        state = sgd.state_dict()
        sgd.load_state_dict(state)
        sgd.set_weights(sgd.get_weights())
        sgd.restore_checkpoint(sgd.save_checkpoint())
        sgd.warmup()
        sgd.step()
        assert waited == [BUSY_S] * 7 + [5.0], "only a step has to be that quick"
        waited.clear()
        sgd.foreach_model(str)
        sgd.foreach_worker(len)
        sgd.for_model(str)
        sgd.get_model()
        sgd.validate()
        assert waited == [None] * 5
    assert link.patience_s is None


def test_metrics_that_are_no_dict():
    class Telling(Falling):
        def get_metrics(self):
            return 3

    with pytest.raises(ArgumentTypeError, match=r"Telling.get_metrics\(\) has returned 3; expected a dict of metrics"):
        here(Telling).step()


def test_a_call_from_another_thread():
    """Which would take the answers that this one waits for. The call that is going on does not mind."""
    caught = []

    def elsewhere(model):
        def act():
            for call in (sgd.step, sgd.get_weights, sgd.shutdown):
                with pytest.raises(TrainerStateError, match="Another thread"):
                    call()
                caught.append(call)

        thread = threading.Thread(target=act)
        thread.start()
        thread.join()

    with here() as sgd:
        sgd.foreach_model(elsewhere)
        assert len(caught) == 3
        assert sgd.step().step == 1


def test_a_call_in_the_middle_of_another():
    with here() as sgd:
        with pytest.raises(TrainerStateError, match="in the middle of a call"):
            sgd.foreach_model(lambda model: sgd.step())
        assert sgd.step().step == 1


def test_a_callback_saves_a_checkpoint():
    class Saving(paceline.Callback):
        def handle_result(self, results, **info):
            saved.append(sgd.save_checkpoint())

    saved = []
    with here(callbacks=[Saving()]) as sgd:
        sgd.step()
        assert [info.path for info in paceline.load_run(sgd.run_dir).checkpoints] == saved


@pytest.mark.parametrize(
    "forged",
    [
        {"step": "3"},
        {"step": -1},
        {"positions": None},
        {"positions": [1]},
        {"positions": [([1], None)]},
        {"replica": []},
        {"replica": {}},
        {"replica": {"weights": 1}},
        {"replica": {"weights": {"other": np.ones(1)}}, "step": 5},
    ],
    ids=str,
)
def test_what_is_no_state_changes_nothing(forged):
    with here() as sgd:
        sgd.step()
        with pytest.raises(ArgumentError, match=r"no state of a DistributedSGD|not those of this model"):
            sgd.load_state_dict({**sgd.state_dict(), **forged})
        assert sgd.step().step == 2


def test_second_ctrl_c_before_the_end_has_begun(monkeypatch):
    """The workers are ended all the same."""
    sgd = here()
    sgd.step()
    end, interrupts = sgd._life.end_with, [KeyboardInterrupt()]

    def interrupted(*args):
        if interrupts:
            raise interrupts.pop()
        end(*args)

    monkeypatch.setattr(sgd._life, "end_with", interrupted)
    monkeypatch.setattr(sgd._team, "step", lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        sgd.step()
    assert state_of(sgd) == "STOPPED"


def test_ctrl_c_while_it_ends(monkeypatch):
    """Nothing is left behind, and it is not forgotten."""
    sgd = here()
    sgd.step()
    close, closed = sgd._team.link.close, []

    def interrupted():
        signal.raise_signal(signal.SIGINT)
        close()
        closed.append(True)

    monkeypatch.setattr(sgd._team.link, "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sgd.shutdown()
    assert closed
    assert state_of(sgd) == "SUCCEEDED"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_stacks_that_cannot_be_had_do_not_hide_who_hangs():
    """No descriptor may be left to read them with."""

    def stacks():
        raise OSError(24, "Too many open files")

    team = Team.__new__(Team)
    team.record, team.link = object(), SimpleNamespace(crew=SimpleNamespace(group=SimpleNamespace(stacks=stacks)))
    assert team._keep_stacks() == " Stacks of all ranks could not be written (Too many open files)."


def test_state_that_a_model_cannot_take():
    """The weights are the new ones by then, in some replicas perhaps: nobody may train on with these."""

    class Taking(Falling):
        def get_state(self):
            return {"momentum": 1}

        def set_state(self, state):
            self.momentum = state["momentum"]

    sgd = here(Taking)
    state = sgd.state_dict()
    with pytest.raises(KeyError, match="momentum"):
        sgd.load_state_dict({**state, "replica": {**state["replica"], "own": {}}})
    assert state_of(sgd) == "FAILED"
    with pytest.raises(TrainerStateError, match="has ended"):
        sgd.step()


def test_handler_raises_where_a_call_is_over(monkeypatch):
    """Nothing could be called any more, since a call would seem to go on."""

    def interrupted(self, *raised):
        monkeypatch.undo()
        raise TimeoutError

    sgd = here()
    sgd.step()
    monkeypatch.setattr(team._Asking, "__exit__", interrupted)
    with pytest.raises(TimeoutError):
        sgd.get_weights()
    assert state_of(sgd) == "FAILED"
    with pytest.raises(TrainerStateError, match="has ended"):
        sgd.step()


@pytest.mark.parametrize("is_step", [True, False])
def test_another_thread_ends_it_in_the_middle_of_a_call(is_step):
    """As a block does that is left by Ctrl-C, and the end of the program, while a thread trains."""

    def lose_the_workers():
        thread = threading.Thread(target=life.end_with, args=(None,))
        thread.start()
        thread.join()
        raise AssertionError("poll before start")

    def call():
        if not is_step:
            life.staying(lose_the_workers)
        with life.failing():
            lose_the_workers()

    link = SimpleNamespace(is_torn=False)
    life = Life(SimpleNamespace(record=None, is_asking=False, link=link, close=lambda state, error: None))
    with life.turn(), pytest.raises(TrainerStateError, match="Another thread has ended this"):
        call()
