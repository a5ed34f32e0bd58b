"""Strategies and replicas in one process: the workers' sides are called directly. With and without shared memory."""

import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from sgd_models import Line, OddModel, creator, digest, whole
from torch import nn

from paceline.errors import ArgumentError, ArgumentTypeError, TrainerStateError
from paceline.sgd import NumpyModel, TorchModel
from paceline.sgd.link import LostError
from paceline.sgd.memory import SharedBuffers
from paceline.sgd.replica import replica_of
from paceline.sgd.side import Side, Spec
from paceline.sgd.strategies import ParameterServers, Simple, made_without
from paceline.workers import parcel
from paceline.workers.base import Place
from paceline.workers.proc_files import address_of


class Together:
    """A link to sides that are in this process."""

    def __init__(self, sides):
        self.sides = sides

    @property
    def num_workers(self):
        return len(self.sides)

    def ask(self, verb, *args):
        return [getattr(side, verb)(*args) for side in self.sides]

    def ask_each(self, commands):
        return [getattr(self.sides[rank], verb)(*args) for rank, (verb, args) in commands.items()]


def started(strategy, creator, num_workers, devices, is_shared):
    spec = Spec(creator, devices, strategy.name, num_workers * devices, 1000)
    sides = [Side(spec, Place(rank, rank, 0, num_workers, num_workers)) for rank in range(num_workers)]
    state = sides[0].replicas[0].state_dict()
    for side in sides:
        for replica in side.replicas:
            replica.load_state_dict(state)
    link, buffers = Together(sides), None
    if is_shared:
        num_bytes = sides[0].layout.num_bytes
        buffers, fd = SharedBuffers.create(num_workers, num_bytes)
        assert link.ask("attach", address_of(fd), num_bytes) == [True] * num_workers
        os.close(fd)
    return link, strategy(spec, sides[0].layout, buffers)


@pytest.mark.parametrize("is_shared", [True, False], ids=["memory", "messages"])
@pytest.mark.parametrize("strategy", [Simple, ParameterServers])
@pytest.mark.parametrize(("num_workers", "devices"), [(2, 2), (4, 1), (1, 2)])
def test_same_as_one_process_on_all_rows(strategy, num_workers, devices, is_shared):
    link, made = started(strategy, creator(devices, num_workers), num_workers, devices, is_shared and num_workers > 1)
    for _ in range(5):
        step = made.step(link)
        assert len({digest(replica.model) for side in link.sides for replica in side.replicas}) == 1
    assert [len(part.losses) for part in step.contributions] == [devices] * num_workers
    for name, value in whole(5).items():
        np.testing.assert_allclose(link.sides[0].replicas[0].weights()[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_shared", [True, False], ids=["memory", "messages"])
@pytest.mark.parametrize("strategy", [Simple, ParameterServers])
def test_numpy_models_and_gradients_that_only_some_have(strategy, is_shared):
    link, made = started(strategy, lambda worker: Line(worker), 2, 1, is_shared)
    made.step(link)
    one, two = (side.replicas[0].model for side in link.sides)
    np.testing.assert_array_equal(one.weights["slope"], two.weights["slope"])
    # slope: 1 - 0.1 * mean(2 * (1 - 0), 2 * (1 - 1)); offset: -0.1 * mean(1, nothing)
    np.testing.assert_allclose(one.weights["slope"], 0.9)
    np.testing.assert_allclose(one.weights["offset"], -0.05, rtol=1e-6)
    assert one.weights["offset"].dtype == np.float32


def test_a_step_that_stands_and_that_nobody_has_told_of():
    made = made_without(LostError("rank 1 was killed", (0,), []))
    assert (made.contributions, made.timings["step"]) == ([], 0.0)


def test_sums_over_devices_as_in_2018():
    spec = Spec(lambda worker, device: Line(0), 2, "simple", divisor=1.0, bucket_bytes=1000)
    side = Side(spec, Place())
    side.step_alone()
    np.testing.assert_allclose(side.replicas[0].model.weights["slope"], 1 - 0.1 * (2 + 2))


def test_state_of_a_torch_replica_includes_the_optimizer():
    one, two = replica_of(OddModel(0)), replica_of(OddModel(1))
    for _ in range(2):
        one.apply(one.compute().gradients)
    two.load_state_dict(one.state_dict())
    for replica in (one, two):
        replica.apply([np.ones(slot.shape, slot.dtype) for slot in replica.slots])
    assert digest(one.model) == digest(two.model)


def test_state_of_a_numpy_replica_includes_the_momentum():
    one, two = replica_of(Line(0)), replica_of(Line(1))
    one.apply(one.compute().gradients)
    two.load_state_dict(one.state_dict())
    for replica in (one, two):
        replica.apply([np.ones(slot.shape, slot.dtype) for slot in replica.slots])
    np.testing.assert_array_equal(one.model.weights["slope"], two.model.weights["slope"])


def test_schedulers_make_their_steps():
    class Scheduled(OddModel):
        def get_scheduler(self):
            return torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.1)

        def get_optimizer(self):
            self.optimizer = super().get_optimizer()
            return self.optimizer

    replica = replica_of(Scheduled(0))
    replica.apply(replica.compute().gradients)
    assert replica.optimizer.param_groups[0]["lr"] == pytest.approx(0.005)
    other = replica_of(Scheduled(1))
    other.load_state_dict(replica.state_dict())
    assert other.scheduler.last_epoch == 1


def test_half_precision_travels_as_float32():
    class Half(TorchModel):
        def __init__(self):
            self.module = nn.Linear(2, 1).bfloat16()

        def get_loss(self):
            return self.module(torch.ones(1, 2, dtype=torch.bfloat16)).sum()

        def get_optimizer(self):
            return torch.optim.SGD(self.module.parameters(), lr=0.5)

    replica = replica_of(Half())
    before = replica.weights()["weight"]
    computed = replica.compute()
    assert {gradient.dtype.name for gradient in computed.gradients} == {"float32"}
    replica.apply(computed.gradients)
    assert replica.module.weight.dtype == torch.bfloat16
    np.testing.assert_allclose(replica.weights()["weight"], before - 0.5, atol=1e-2)


@pytest.mark.parametrize("devices", [1, 2], ids=["during the backward pass", "afterwards"])
def test_mean_of_small_gradients_of_half_precision_by_64_workers(monkeypatch, devices):
    """A 64th of one is less than half precision can tell from zero, or tell exactly."""

    def all_reduce_of_64(tensor, async_op):
        tensor.mul_(64)  # that all have the same
        return SimpleNamespace(wait=lambda: None)

    class Half(TorchModel):
        given = torch.tensor([1e-6, 7e-6, 1.0], dtype=torch.float16)

        def __init__(self):
            self.weight = nn.Parameter(torch.ones(3, dtype=torch.float16))

        def get_loss(self):
            return (self.weight * self.given).sum()

        def get_optimizer(self):
            return torch.optim.SGD([self.weight], lr=0.1)

    monkeypatch.setattr(dist, "all_reduce", all_reduce_of_64)
    side = Side(Spec(Half, devices, "allreduce", 64.0 * devices, 1000), Place(0, 0, 0, 64, 64))
    side.step_in_group()
    assert all(torch.equal(replica.model.weight.grad, Half.given) for replica in side.replicas)


def test_gradients_that_torch_has_yet_to_conjugate():
    """numpy knows no such thing."""

    class Complex(TorchModel):
        def __init__(self):
            self.weight = nn.Parameter(torch.ones(2, dtype=torch.complex64))

        def get_loss(self):
            return torch.view_as_real(self.weight.conj().resolve_conj()).sum()

        def get_optimizer(self):
            return torch.optim.SGD([self.weight], lr=1.0)

    replica = replica_of(Complex())
    [gradient] = replica.compute().gradients
    assert replica.model.weight.grad.is_conj()
    np.testing.assert_array_equal(gradient, [1 - 1j, 1 - 1j])
    replica.apply([gradient])
    np.testing.assert_array_equal(replica.weights()["parameter_0"], [1j, 1j])


def test_sparse_gradients_become_dense():
    class Sparse(TorchModel):
        def __init__(self):
            self.module = nn.Embedding(5, 2, sparse=True)

        def get_loss(self):
            return self.module(torch.tensor([1, 3])).sum()

        def get_optimizer(self):
            return torch.optim.SGD(self.module.parameters(), lr=1.0)

    replica = replica_of(Sparse())
    before = replica.weights()["weight"]
    replica.apply(replica.compute().gradients)
    changed = (replica.weights()["weight"] != before).any(1)
    assert changed.tolist() == [False, True, False, True, False]


class Weighed(TorchModel):
    """Its loss has a weight of its own, which is in no module."""

    def __init__(self, weight=1.0):
        self.module = nn.Linear(2, 1)
        self.weight = nn.Parameter(torch.tensor(weight))

    def get_loss(self):
        return self.module(torch.ones(1, 2)).sum() * self.weight

    def get_optimizer(self):
        return torch.optim.SGD([*self.module.parameters(), self.weight], lr=0.1, momentum=0.9)


def test_weights_outside_of_the_module_are_the_model_s_too():
    one, two = replica_of(Weighed(1.0)), replica_of(Weighed(2.0))
    two.load_state_dict(one.state_dict())
    assert two.model.weight.item() == 1.0
    assert two.weights().keys() == {"weight", "bias", "parameter_2"}
    two.set_weights({**two.weights(), "parameter_2": 3.0})
    assert two.model.weight.item() == 3.0


@pytest.mark.parametrize("change", ["thawed", "added"])
def test_weight_that_only_this_replica_would_train(change):
    """Nobody sends its gradient: replicas would become different, and nobody would notice."""
    model = Weighed()
    late = nn.Parameter(torch.ones(3), requires_grad=change == "added")
    if change == "thawed":
        model.get_optimizer = lambda: torch.optim.SGD([*model.module.parameters(), late], lr=0.1)
    replica = replica_of(model)
    if change == "added":
        replica.optimizer.add_param_group({"params": [late]})
    late.requires_grad_(True)
    replica.apply(replica.compute().gradients)  # it has no part in the loss yet
    model.get_loss = lambda: model.module(torch.ones(1, 2)).sum() + late.sum()
    gradients = replica.compute().gradients
    with pytest.raises(TrainerStateError, match=r"1 weights of shapes \[\[3\]\] have a gradient, but were frozen"):
        replica.apply(gradients)


def test_metrics_that_come_with_the_loss_are_plain():
    model = OddModel(1)
    replica = replica_of(model)
    loss = model.get_loss()
    model.get_loss = lambda: (loss, {"double": 2 * loss})
    assert replica.compute().metrics == {"part": 1, "twice": 2.0, "double": pytest.approx(2 * loss.item())}


def test_models_are_known_by_what_they_have():
    class Duck:
        def __init__(self):
            self.net = nn.Linear(2, 1)

        def get_loss(self):
            return self.net(torch.ones(1, 2)).sum()

        def get_optimizer(self):
            return torch.optim.SGD(self.net.parameters(), lr=1.0)

    class Itself(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 1)
            self.optimizer = torch.optim.SGD(self.parameters(), lr=1.0)

        def get_loss(self):
            return self.layer(torch.ones(1, 2)).sum()

    class Quack:
        learning_rate = 1.0

        def __init__(self):
            self.weights = [np.ones(2)]

        def get_weights(self):
            return self.weights

        def set_weights(self, weights):
            self.weights = weights

        def loss_and_grad(self):
            return 1.0, [np.ones(2)]

    assert {*replica_of(Duck()).weights()} == {"weight", "bias"}
    assert {*replica_of(Itself()).weights()} == {"layer.weight", "layer.bias"}
    quack = replica_of(Quack())
    quack.apply(quack.compute().gradients)
    assert [weight.tolist() for weight in quack.model.weights] == [[0, 0]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: object(), "has returned object, of which it is not known how to train it"),
        (lambda: type("Bare", (TorchModel,), {"get_optimizer": lambda self: None})(), "expected one of torch.optim"),
    ],
)
def test_models_that_are_none(make, message):
    with pytest.raises(ArgumentTypeError, match=message):
        replica_of(make())


def test_losses_that_are_none():
    model = OddModel(0)
    replica = replica_of(model)
    model.get_loss = lambda: 3.0
    with pytest.raises(ArgumentTypeError, match=r"get_loss\(\) has returned 3.0"):
        replica.compute()
    model.get_loss = lambda: torch.ones(2)
    with pytest.raises(ArgumentTypeError, match=r"a tensor of shape \[2\]"):
        replica.compute()
    model.get_loss = lambda: torch.tensor(1.0)
    with pytest.raises(ArgumentTypeError, match="depends on none of its weights"):
        replica.compute()
    loss = OddModel.get_loss(model)
    model.get_loss = lambda: (loss, 3)
    with pytest.raises(ArgumentTypeError, match=r"get_loss\(\), with its loss, has returned 3; expected a dict"):
        replica.compute()
    model.get_loss = lambda: (torch.tensor(1.0), {}, 3)
    with pytest.raises(ArgumentTypeError, match=r"3\); expected a tensor with one element, or \(loss, metrics\)"):
        replica.compute()


def test_gradients_that_are_none_of_the_weights():
    model = Line(0)
    replica = replica_of(model)
    model.loss_and_grad = lambda: (1.0, {"other": np.ones(1)})
    with pytest.raises(ArgumentError, match="what is no weight: other"):
        replica.compute()
    model.loss_and_grad = lambda: (1.0, {"slope": np.ones(4)})
    with pytest.raises(ArgumentError, match=r"slope is \[4\], but the weight \[3\]"):
        replica.compute()
    model.loss_and_grad = lambda: 1.0
    with pytest.raises(ArgumentTypeError, match="expected \\(loss, gradients\\)"):
        replica.compute()
    model.loss_and_grad = lambda: (10**400, {"slope": np.ones(3)})
    with pytest.raises(ArgumentError, match="larger than any float"):
        replica.compute()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (None, "returned None as its gradients"),
        ({"slope": [None] * 3}, "slope has values of type object"),
        ({"slope": ["1", "2", "3"]}, "slope has values of type <U1"),
        ({"slope": np.ones(3) * 1j}, "slope has values of type complex128, but travels as float"),
        ({"slope": [[1], [2, 3], 4]}, r"slope is \[\[1\], \[2, 3\], 4\]; expected an array"),
    ],
    ids=["none", "objects", "texts", "complex", "ragged"],
)
def test_gradients_that_are_no_numbers(given, told):
    model = Line(0)
    replica = replica_of(model)
    model.loss_and_grad = lambda: (1.0, given)
    with pytest.raises(ArgumentTypeError, match=told):
        replica.compute()


@pytest.mark.parametrize("model", [OddModel(0), Line(0)], ids=["torch", "numpy"])
def test_weights_of_another_model_are_refused(model):
    replica = replica_of(model)
    weights = replica.weights()
    name = next(iter(weights))
    with pytest.raises(ArgumentError, match=f"missing: {name}; unknown: other"):
        replica.set_weights({**{key: value for key, value in weights.items() if key != name}, "other": 1})
    with pytest.raises(ArgumentError, match=rf"{name} is \[9\], expected"):
        replica.set_weights({**weights, name: np.zeros(9)})
    replica.set_weights({key: value + 1 for key, value in weights.items()})
    np.testing.assert_array_equal(replica.weights()[name], weights[name] + 1)


@pytest.mark.parametrize(
    "other",
    [
        lambda weights: torch.optim.Adam(weights, lr=0.1),
        lambda weights: torch.optim.SGD([{"params": [weight]} for weight in weights], lr=0.1),
        None,
    ],
    ids=["other options", "other groups", "none"],
)
def test_state_of_another_optimizer_is_refused(other):
    """torch takes some, and cannot make a step with them."""
    model, given = Weighed(), Weighed()
    given.get_optimizer = lambda: (other or torch.optim.SGD)([*given.module.parameters(), given.weight])
    state = replica_of(given).state_dict()
    if other is None:  # as of a numpy model with the same weights
        del state["optimizer"]
    replica = replica_of(model)
    replica.apply(replica.compute().gradients)
    before = parcel.dumps(replica.state_dict())
    with pytest.raises(ArgumentError, match="The state of the optimizer is not that of SGD"):
        replica.load_state_dict(state)
    assert parcel.dumps(replica.state_dict()) == before
    replica.apply(replica.compute().gradients)


def test_state_of_another_scheduler_is_refused():
    """Before anything is taken: some schedulers look for what is theirs, and raise."""

    def replica_with(scheduler, *args):
        model = Weighed()
        model.optimizer = model.get_optimizer()
        model.get_optimizer = lambda: model.optimizer
        model.get_scheduler = lambda: scheduler(model.optimizer, *args)
        made = replica_of(model)
        made.apply(made.compute().gradients)
        return made

    state = replica_with(torch.optim.lr_scheduler.StepLR, 1).state_dict()
    replica = replica_with(torch.optim.lr_scheduler.LambdaLR, lambda step: 1 / (1 + step))
    state["weights"]["weight"] += 1
    before = parcel.dumps(replica.state_dict())
    for given in (state["scheduler"], None):
        with pytest.raises(ArgumentError, match="The state of the scheduler is not that of LambdaLR"):
            replica.load_state_dict({**state, "scheduler": given})
        assert parcel.dumps(replica.state_dict()) == before


def test_weights_of_a_state_may_be_arrays():
    """As `get_weights` gives them. What is neither that nor a number is refused before anything is taken."""
    replica, given = replica_of(Weighed()), replica_of(Weighed(2.0))
    given.apply(given.compute().gradients)
    state = given.state_dict()
    before = parcel.dumps(replica.state_dict())
    with pytest.raises(ArgumentError, match="The weight parameter_2 is None"):
        replica.load_state_dict({**state, "weights": {**state["weights"], "parameter_2": None}})
    with pytest.raises(ArgumentError, match="The weight parameter_2 is 'x'"):
        replica.set_weights({**given.weights(), "parameter_2": "x"})
    assert parcel.dumps(replica.state_dict()) == before
    replica.load_state_dict({**state, "weights": given.weights()})
    assert parcel.dumps(replica.state_dict()) == parcel.dumps(state)


def test_plain_gradient_descent_needs_a_rate():
    class NoRate(NumpyModel):
        learning_rate = None

        def __init__(self):
            self.weights = {"a": np.ones(1)}

        def loss_and_grad(self):
            return 1.0, {"a": np.ones(1)}

    replica = replica_of(NoRate())
    with pytest.raises(ArgumentTypeError, match="neither apply_gradients"):
        replica.apply(replica.compute().gradients)
