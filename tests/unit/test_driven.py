"""A driven loop in this process, where a debugger works; and what its commands are made of."""

import gc
import math
import pickle

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from paceline.data import from_numpy
from paceline.driven import Optimizer, WorkerGroup, distributed_training
from paceline.driven.commands import Line, line_of_caller, used_values
from paceline.driven.store import Store, own_value, packing, unpacking_from
from paceline.driven.value import mean_of
from paceline.errors import ArgumentError, ArgumentTypeError, TrainerStateError

INPUTS = torch.arange(12.0).reshape(6, 2)
LABELS = INPUTS.sum(1, keepdim=True)


@pytest.fixture(scope="module")
def worker_group():
    with WorkerGroup(num_workers=0) as made:
        yield made


def store_of(worker_group):
    return worker_group.pipeline._workers._wire.shared["driven"][worker_group.id]


# --- values -----------------------------------------------------------------------------------------------------------


def test_value_is_a_number_when_asked(worker_group):
    value = worker_group.apply(lambda: torch.tensor(2.5, requires_grad=True) * 1)
    assert (value.item(), float(value), f"{value:.3f}", str(value)) == (2.5, 2.5, "2.500", "2.5")
    assert "%.2f" % value == "2.50"  # noqa: UP031
    assert value < 3 <= value + 1
    assert value > 2 >= value - 1
    assert (value == 2.5, value != 2, 2.5 == value, value == 2) == (True, True, True, False)  # noqa: SIM300
    assert (int(value), round(value, 1), round(value - 0.4), "%d" % value) == (2, 2.5, 2, "2")  # noqa: UP031
    assert bool(value)
    assert not value - 2.5
    [brought] = value.get()
    assert brought == 2.5
    assert not brought.requires_grad


@pytest.mark.parametrize(
    ("parts", "mean"),
    [([math.inf, -math.inf], math.nan), ([1e308, 1e308], 1e308), ([0.1] * 10, 0.1), ([1e16, 1.0, -1e16], 1 / 3)],
)
def test_mean_over_ranks(parts, mean):
    assert mean_of(parts) == pytest.approx(mean, rel=1e-15, nan_ok=True)


def test_value_is_itself_among_others(worker_group):
    one, two = (worker_group.apply(lambda: 1.0) for _ in range(2))
    assert one in (two, one)
    assert (one == two, len({one, two, one})) == (False, 2)


def test_arithmetic_stays_on_the_workers(worker_group):
    value = worker_group.apply(lambda: 6.0)
    made = [value + 1, 1 + value, value - 1, 1 - value, value * 2, 2 * value, value / 4, -value]
    assert [one.get() for one in made] == [[7], [7], [5], [-5], [12], [12], [1.5], [-6]]


def test_value_of_several_parts_is_unpacked(worker_group):
    first, second = worker_group.apply(lambda: ("a", [1, 2]))
    assert (first.get(), second.get(), len(second), second[1].get()) == (["a"], [[1, 2]], 2, [2])


def test_print_shows_what_is_no_number(worker_group):
    assert str(worker_group.apply(lambda: "3.0")) == "rank 0: 3.0"
    assert str(worker_group.apply(lambda: torch.zeros(2))) == "rank 0: tensor([0., 0.])"


def test_repr_asks_nothing(worker_group):
    value = worker_group.apply(lambda: 1)
    num_sent = next(worker_group._numbers)
    assert "on the workers" in repr(value)
    assert next(worker_group._numbers) == num_sent + 1


@pytest.mark.parametrize("made", [lambda: torch.zeros(2, 3), lambda: "7", lambda: None])
def test_no_number(worker_group, made):
    with pytest.raises(ArgumentTypeError, match="is no number but a"):
        worker_group.apply(made).item()


def test_attribute_that_is_only_there(worker_group):
    with pytest.raises(AttributeError, match=r"apply\(lambda value: value.shape, value\)"):
        _ = worker_group.apply(lambda: INPUTS).shape


def test_values_are_forgotten_with_their_names(worker_group):
    gc.collect()
    worker_group.wait()
    num_before = len(store_of(worker_group))
    values = [worker_group.apply(lambda: 1) for _ in range(5)]
    worker_group.wait()
    assert len(store_of(worker_group)) == num_before + 5
    del values[1:]
    gc.collect()
    assert values[0].item() == 1
    worker_group.wait()
    assert len(store_of(worker_group)) == num_before + 1


def test_name_of_a_value_means_nothing_elsewhere(worker_group):
    value = worker_group.apply(lambda: 1)
    with pytest.raises(TrainerStateError, match=r"means nothing elsewhere.*model\.state_dict\(\)"):
        pickle.dumps(value)  # as torch.save(model, path) does
    with packing():
        packed = pickle.dumps(value)
    with unpacking_from(Store("another")), pytest.raises(TrainerStateError, match="given to another"):
        pickle.loads(packed)
    with unpacking_from(Store("mine")), pytest.raises(TrainerStateError, match="never made"):
        own_value("mine", 1)


# --- functions --------------------------------------------------------------------------------------------------------


def test_function_gets_values_by_argument_and_by_name(worker_group):
    one, two = worker_group.apply(lambda: 1), worker_group.apply(lambda: 2)
    assert worker_group.apply(lambda a, b: (a, b), one, two).get() == [(1, 2)]
    assert worker_group.apply(lambda a, b=0: (a, b), a=one, b=two).get() == [(1, 2)]
    assert worker_group.apply(lambda: (two, one)).get() == [(2, 1)]
    assert worker_group.apply(lambda first, second: (second, first, two, one)).get() == [(1, 2, 2, 1)]


def test_values_that_a_function_uses_come_in_its_order(worker_group):
    a, b = worker_group.apply(lambda: 1), worker_group.apply(lambda: 2)
    assert list(used_values(lambda: (b, max, a, b))) == [b, a]
    assert list(used_values(print)) == []


def test_function_that_lacks_values(worker_group):
    with pytest.raises(ArgumentError, match="has 2 parameters and was given no values"):
        worker_group.apply(lambda output, labels: 1)
    with pytest.raises(ArgumentTypeError, match="expected a function, got a int"):
        worker_group.apply(3)


def test_function_cannot_take_the_group_along(worker_group):
    with pytest.raises(ArgumentTypeError, match="A WorkerGroup is the driver's"):
        worker_group.apply(lambda: worker_group)


def test_line_is_the_caller_s():
    line = line_of_caller()
    assert str(line) == f"{__file__}, line {line.number}: line = line_of_caller()"
    assert str(Line("<stdin>", 3)) == "<stdin>, line 3"


# --- a loop -----------------------------------------------------------------------------------------------------------


def test_loop_trains_as_one_without_workers(worker_group):
    torch.manual_seed(0)
    bare = nn.Linear(2, 1)
    model = distributed_training(bare, worker_group)
    optimizer = Optimizer(model, worker_group, lr=0.01)
    for inputs, labels in worker_group.batches(TensorDataset(INPUTS, LABELS), batch_size=3):
        optimizer.zero_grad()
        output = model(inputs)
        loss = worker_group.apply(lambda a, b: nn.functional.mse_loss(output, labels))  # noqa: B023
        loss.backward()
        optimizer.step()
    own = torch.optim.SGD(bare.parameters(), lr=0.01)
    for inputs, labels in zip(INPUTS.split(3), LABELS.split(3), strict=True):
        own.zero_grad()
        nn.functional.mse_loss(bare(inputs), labels).backward()
        own.step()
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, bare.state_dict()[name])


def test_each_loop_is_an_epoch_also_after_one_that_was_left(worker_group):
    batches = worker_group.batches(from_numpy({"x": INPUTS[:, 0].numpy()}), batch_size=2, label_column=None)
    assert next(iter(batches)).get()[0].flatten().tolist() == [0, 2]
    for _ in range(2):
        assert [batch.get()[0].flatten().tolist() for batch in batches] == [[0, 2], [4, 6], [8, 10]]


def test_loop_within_a_loop_over_the_same_batches(worker_group):
    """There is one reader, which the inner loop would leave at its end: the outer one must not seem to have ended."""
    batches = worker_group.batches(TensorDataset(INPUTS), 3)
    outer = iter(batches)
    next(outer)
    assert sum(1 for _ in batches) == 2
    with pytest.raises(TrainerStateError, match="another loop over these batches has begun"):
        next(outer)
    assert sum(1 for _ in batches) == 2


def test_dataset_is_read_where_the_workers_are(worker_group):
    batches = from_numpy({"x": INPUTS[:, 0].numpy()}).to_torch(3, locality_hint=worker_group, label_column=None)
    assert [batch.get()[0].flatten().tolist() for batch in batches] == [[0, 2, 4], [6, 8, 10]]


def test_shuffled_batches_follow_the_seed():
    def order(seed):
        with WorkerGroup(num_workers=0, seed=seed) as worker_group:
            dataset = from_numpy({"x": INPUTS[:, 0].numpy()}).random_shuffle()
            return [one.get()[0].tolist() for one in worker_group.batches(dataset, 3, label_column=None)]

    assert order(1) == order(1) != order(2)


@pytest.mark.parametrize(("rest", "sizes"), [("pad", [4, 4]), ("drop", [4])])
def test_rest_of_the_rows(worker_group, rest, sizes):
    batches = worker_group.batches(TensorDataset(INPUTS, LABELS), batch_size=4, rest=rest)
    assert [len(inputs) for inputs, _ in batches] == sizes


@pytest.mark.parametrize(("rest", "number"), [("pad", 2), ("drop", 1)])
def test_number_of_batches(worker_group, rest, number):
    batches = worker_group.batches(TensorDataset(INPUTS, LABELS), batch_size=4, rest=rest)
    loop = iter(batches)
    next(loop)
    assert len(batches) == number == len([*loop]) + 1


def test_number_of_batches_that_nobody_knows(worker_group):
    """What is under way goes on."""

    class Rows(IterableDataset):
        def __iter__(self):
            return iter(INPUTS)

    batches = worker_group.batches(Rows(), batch_size=2)
    loop = iter(batches)
    next(loop)
    with pytest.raises(TypeError, match="not known before they are read"):
        len(batches)
    assert len([one for one in loop]) == 2


def test_validation_keeps_no_gradients(worker_group):
    model = worker_group.distribute(lambda: nn.Sequential(nn.Linear(2, 1), nn.Dropout(0.5)))
    with worker_group.no_grad():
        output = model.eval()(INPUTS)
    assert worker_group.apply(lambda: (output.requires_grad, model.training)).get() == [(False, False)]
    output = model.train()(INPUTS)
    assert worker_group.apply(lambda: (output.requires_grad, model.training)).get() == [(True, True)]


def test_state_goes_from_one_model_and_optimizer_to_another(worker_group):
    made = [worker_group.distribute(nn.Linear(2, 1)) for _ in range(2)]
    first, second = (worker_group.optimizer(torch.optim.SGD, model, lr=0.1, momentum=0.9) for model in made)
    worker_group.apply(lambda: made[0](INPUTS).sum().backward()).get()
    first.step()
    made[1].load_state_dict(made[0].state_dict())
    second.load_state_dict(first.state_dict())
    for one, other in zip(made[0].state_dict().values(), made[1].state_dict().values(), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(*(one.state_dict()["state"][0]["momentum_buffer"] for one in (first, second)))


def test_optimizer_of_a_function(worker_group):
    model = worker_group.distribute(nn.Linear(2, 1))
    made = worker_group.optimizer(lambda model, lr: torch.optim.Adam([model.bias], lr=lr), model, lr=0.5)
    assert made.state_dict()["param_groups"][0]["lr"] == 0.5
    assert made.state_dict()["param_groups"][0]["params"] == [0]


# --- errors -----------------------------------------------------------------------------------------------------------


def test_error_names_the_line_and_the_group_lives_on(worker_group):
    kept = worker_group.apply(lambda: 4)
    with pytest.raises(ZeroDivisionError) as caught:
        worker_group.apply(lambda: 1 / 0).get()
    assert "test_driven.py, line" in "".join(caught.value.__notes__)
    assert "worker_group.apply(lambda: 1 / 0).get()" in "".join(caught.value.__notes__)
    assert kept.item() == 4


def test_exit_is_an_error(worker_group):
    with pytest.raises(Exception, match=r"ended itself with sys.exit\(0\)"):
        worker_group.apply(exit, 0).get()


def test_error_at_the_end_of_the_block_is_raised_and_what_the_block_raises_counts():
    with pytest.raises(ZeroDivisionError), WorkerGroup(num_workers=0) as worker_group:
        worker_group.apply(lambda: 1 / 0)
    with pytest.raises(KeyError), WorkerGroup(num_workers=0) as worker_group:
        raise KeyError


def test_closed_group():
    worker_group = WorkerGroup(num_workers=0)  # begins at its first use
    value = worker_group.apply(lambda: 1)
    worker_group.close()
    worker_group.close()
    with pytest.raises(TrainerStateError, match="is closed: its models and values are gone"):
        value.item()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_workers": -1}, "expected 1 or more, or 0"),
        ({"num_workers": (1, 2)}, "expected a whole number"),
        ({"seed": "a"}, "seed is 'a' of type str"),
        ({"hang_timeout_s": 0}, "expected a positive number of seconds"),
        ({"engine": "moon"}, "the engines are"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises((ArgumentError, ArgumentTypeError), match=message):
        WorkerGroup(**arguments)


def test_what_cannot_be_distributed_or_read(worker_group):
    with pytest.raises(ArgumentTypeError, match=r"expected a torch.nn.Module, or a function that makes one"):
        worker_group.distribute(3)
    with pytest.raises(ArgumentError, match="expected 'pad' or 'drop'"):
        worker_group.batches(INPUTS.numpy(), 4, rest="uneven")
