"""Units, periods, schedulers, samplers and metrics of a trial: pure, and by known numbers."""

import numpy as np
import pytest
import torch

from paceline.errors import ArgumentError, ArgumentTypeError
from paceline.pytorch.kept import found_in
from paceline.pytorch.metrics import Partial, TrainingMetrics, ValidationMetrics, mean_over_ranks, over_ranks, reduced
from paceline.pytorch.optimization import Optimization
from paceline.pytorch.plan import Plan, reported_names
from paceline.pytorch.reducers import MetricReducer, Reducers
from paceline.pytorch.samplers import (
    DistributedBatchSampler,
    DistributedSampler,
    RepeatSampler,
    ReproducibleShuffleSampler,
    SkipSampler,
)
from paceline.pytorch.schedulers import Moment, StepMode, is_update, num_steps
from paceline.pytorch.trial import Evaluation, PyTorchTrial, Reducer
from paceline.pytorch.units import Batch, Epoch, Lengths, Record, TrainUnit, more

# --- units ----------------------------------------------------------------------------------------------------------


def fired(unit, num_batches, epoch_length=10, rows=4):
    """At which batches, from 1 on, a period is due."""
    lengths, due = Lengths(), []
    for number in range(1, num_batches + 1):
        before, lengths = lengths, lengths.after(rows, number % epoch_length == 0)
        due += [number] if unit.is_due(before, lengths) else []
    return due


@pytest.mark.parametrize(
    ("unit", "due"),
    [
        (Batch(7), [7, 14, 21, 28]),
        (Batch([5, 12, 13]), [5, 12, 13]),
        (Batch(1000), []),
        (Epoch(1), [10, 20, 30]),
        (Epoch(2), [20]),
        (Epoch({1, 3}), [10, 30]),
        (Record(40), [10, 20, 30]),
        (Record(10), [3, 5, 8, 10, 13, 15, 18, 20, 23, 25, 28, 30]),  # 12, 20, 32, 40 … rows: when the mark is passed
        (Record(1), list(range(1, 31))),
        (Record([6, 120]), [2, 30]),
    ],
)
def test_period_is_due(unit, due):
    assert fired(unit, 30) == due


@pytest.mark.parametrize(("unit", "last"), [(Batch(7), 7), (Epoch(2), 20), (Record(30), 8), (Record(32), 8)])
def test_length_ends(unit, last):
    lengths, number = Lengths(), 0
    while not unit.is_over(lengths):
        number += 1
        lengths = lengths.after(4, number % 10 == 0)
    assert number == last
    assert unit.share(lengths) == 1.0


def test_share_of_a_length():
    assert Batch(8).share(Lengths(batches=2)) == 0.25
    assert Epoch(4).share(Lengths(batches=15, epochs=1), epoch_share=0.5) == 0.375


def test_so_much_further():
    assert more(Epoch(2), Lengths(batches=30, epochs=3)) == Epoch(5)
    assert more(Record(10), Lengths(records=7)) == Record(17)


@pytest.mark.parametrize("value", [0, -1, [3, 0]])
def test_no_unit_below_one(value):
    with pytest.raises(ArgumentError, match="from 1 on"):
        Batch(value)


@pytest.mark.parametrize("value", ["3", 2.0, True, None, {1: 2}, [1, "2"]])
def test_unit_is_a_whole_number(value):
    with pytest.raises(ArgumentTypeError, match="whole number"):
        Epoch(value)


def test_unit_of_no_kind():
    with pytest.raises(ArgumentTypeError, match="Batch, Epoch and Record"):
        TrainUnit(3)


def test_plan_says_what_is_wrong_with_it():
    with pytest.raises(ArgumentTypeError, match=r"max_length is 3; expected a length: pytorch.Batch\(100\)"):
        Plan(3)
    with pytest.raises(ArgumentTypeError, match=r"max_length is Batch\(\[1, 2\]\): a length is one number"):
        Plan(Batch([1, 2]))
    with pytest.raises(ArgumentTypeError, match="validation_period is 10; expected a period"):
        Plan(Batch(3), validation_period=10)
    with pytest.raises(ArgumentError, match="checkpoint_policy='newest': expected one of 'best', 'all', 'none'"):
        Plan(Batch(3), checkpoint_policy="newest")


def test_plan_mixes_units():
    plan = Plan(Epoch(1), checkpoint_period=Batch(4), validation_period=Record(20), reporting_period=Batch([3]))
    lengths, due = Lengths(), {}
    for number in range(1, 11):
        before, lengths = lengths, lengths.after(4, number == 10)
        due[number] = plan.due(before, lengths)
    assert [number for number, one in due.items() if one.checkpoint] == [4, 8]
    assert [number for number, one in due.items() if one.validation] == [5, 10]
    assert [number for number, one in due.items() if one.report] == [3]
    assert [number for number, one in due.items() if one.end] == [10]


def test_what_is_best_is_decided_by():
    plan = Plan(Batch(1))
    assert plan.score_name({"accuracy": 1}) == "accuracy"
    assert plan.score_name({"a": 1, "validation_loss": 2}) == "validation_loss"
    assert plan.score_name({"a": 1, "b": 2}) is None
    with pytest.raises(ArgumentError, match=r"metric='f1' decides .* it has 'a', 'b'"):
        Plan(Batch(1), metric="f1").score_name({"a": 1, "b": 2})


def test_names_of_a_validation():
    assert reported_names({"loss": 1, "validation_loss": 2}) == {"val_loss": 1, "validation_loss": 2}


# --- learning-rate schedulers ---------------------------------------------------------------------------------------


def steps_at(mode, frequency, aggregation, num_batches=24, epoch_length=6, is_known=True):
    """Batches, from 0 on, after which a scheduler steps, as often as it does."""
    steps, ended = [], 0
    for batch in range(num_batches):
        epoch, place = divmod(batch, epoch_length)
        left = epoch_length - 1 - place
        ended += left == 0
        known = (left, epoch_length) if is_known else (None, None)
        steps += [batch] * num_steps(mode, frequency, Moment(batch, epoch, *known, left == 0, ended), aggregation)
        ended = 0 if is_update(batch, aggregation) else ended
    return steps


@pytest.mark.parametrize(
    ("mode", "frequency", "aggregation", "expected"),
    [
        (StepMode.STEP_EVERY_OPTIMIZER_STEP, 2, 4, [7, 15, 23]),
        (StepMode.STEP_EVERY_OPTIMIZER_STEP, 1, 4, [3, 7, 11, 15, 19, 23]),
        (StepMode.STEP_EVERY_OPTIMIZER_STEP, 3, 1, [2, 5, 8, 11, 14, 17, 20, 23]),
        (StepMode.STEP_EVERY_BATCH, 1, 1, list(range(24))),
        (StepMode.STEP_EVERY_BATCH, 1, 2, [number for odd in range(1, 24, 2) for number in (odd, odd)]),
        (StepMode.STEP_EVERY_BATCH, 3, 2, [3, 5, 9, 11, 15, 17, 21, 23]),
        (StepMode.STEP_EVERY_EPOCH, 1, 1, [5, 11, 17, 23]),
        (StepMode.STEP_EVERY_EPOCH, 2, 1, [11, 23]),
        (StepMode.STEP_EVERY_EPOCH, 1, 4, [3, 11, 15, 23]),  # where the next step of the optimizer is in another epoch
        (StepMode.STEP_EVERY_EPOCH, 1, 12, [11, 11, 23, 23]),
        (StepMode.MANUAL_STEP, 1, 1, []),
    ],
)
def test_scheduler_steps(mode, frequency, aggregation, expected):
    assert steps_at(mode, frequency, aggregation) == expected


def test_scheduler_of_epochs_whose_length_nobody_knows():
    assert steps_at(StepMode.STEP_EVERY_EPOCH, 1, 1, is_known=False) == [5, 11, 17, 23]
    assert steps_at(StepMode.STEP_EVERY_EPOCH, 1, 4, is_known=False) == [7, 11, 19, 23], "made up for, none is lost"
    assert steps_at(StepMode.STEP_EVERY_EPOCH, 2, 4, is_known=False) == [11, 23]
    assert steps_at(StepMode.STEP_EVERY_EPOCH, 1, 12, is_known=False) == [11, 11, 23, 23]


# --- mixed precision ------------------------------------------------------------------------------------------------


def test_scaler_hears_of_steps_only():
    """A trial may leave a batch out, as those do that train two models in turn."""
    optimization = Optimization(aggregation_frequency=1)
    scaler = optimization.wrap_scaler(torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1))
    optimization.is_automatic = True
    model = optimization.wrap_model(torch.nn.Linear(1, 1), False, None)
    sgd = optimization.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), 1, None)
    scales = []
    for batch in range(4):
        optimization.begin_batch(batch)
        if batch % 2:
            optimization.backward(model(torch.ones(1, 1)).sum())
            optimization.step(sgd, lambda params: torch.nn.utils.clip_grad_norm_(params, 0.5), True, None)
        optimization.end_batch(Moment(batch, 0, None, None, False))
        scales.append(scaler.get_scale())
    assert scales == [8.0, 16.0, 16.0, 32.0]


# --- optimizers -----------------------------------------------------------------------------------------------------


def test_optimizer_may_add_up_where_others_average_and_is_clipped_after_that():
    optimization = Optimization(aggregation_frequency=2)
    model = optimization.wrap_model(torch.nn.Linear(1, 1, bias=False), False, None)
    model.weight.data.fill_(0.0)
    sgd = optimization.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), 1, averages=False)
    clipped = []

    def clip(params):
        clipped.extend(parameter.grad.item() for parameter in params)
        torch.nn.utils.clip_grad_value_(model.parameters(), 1.5)

    for batch in range(2):
        optimization.begin_batch(batch)
        optimization.backward(model(torch.ones(1, 1)).sum())
        optimization.step(sgd, clip, True, None)
    assert clipped == [2.0]
    assert model.weight.item() == -1.5


def test_gradients_of_other_ranks_are_averaged():
    optimization = Optimization(aggregation_frequency=2)
    model = optimization.wrap_model(torch.nn.Linear(1, 1), False, None)
    optimization.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), 1, None)
    optimization.restore_gradients([[[torch.tensor([[1.0]]), None]], [[torch.tensor([[4.0]]), None]]])
    assert model.weight.grad.tolist() == [[2.5]]
    assert model.bias.grad is None


# --- samplers -------------------------------------------------------------------------------------------------------


def test_items_are_dealt_out():
    shares = [list(DistributedSampler(range(19), 4, rank)) for rank in range(4)]
    assert shares == [[0, 4, 8, 12, 16], [1, 5, 9, 13, 17], [2, 6, 10, 14, 18], [3, 7, 11, 15]]
    assert [len(DistributedSampler(range(19), 4, rank)) for rank in range(4)] == [5, 5, 5, 4]


def test_batches_are_dealt_out():
    batches = torch.utils.data.BatchSampler(range(19), 2, drop_last=False)
    assert list(DistributedBatchSampler(batches, 4, 1)) == [[2, 3], [10, 11], [18]]
    for num_replicas, rank in ((0, 0), (2, 2), (2, -1)):
        with pytest.raises(ArgumentError, match="expected a rank from 0"):
            DistributedBatchSampler(batches, num_replicas, rank)


def test_shuffle_repeat_and_skip():
    shuffled = ReproducibleShuffleSampler(range(5), 777)
    assert [list(shuffled), list(shuffled)] == [[0, 4, 1, 2, 3], [2, 0, 1, 3, 4]]
    skipping = SkipSampler(range(4), 3)
    assert [list(skipping), list(skipping), len(skipping)] == [[3], [0, 1, 2, 3], 4]
    endless = iter(RepeatSampler(range(2)))
    assert [next(endless) for _ in range(5)] == [0, 1, 0, 1, 0]
    with pytest.raises(ArgumentError, match="nothing to repeat"):
        next(iter(RepeatSampler([])))


# --- metrics --------------------------------------------------------------------------------------------------------


def test_training_metrics_are_means_over_batches():
    metrics = TrainingMetrics(keeps_batches=True)
    for value in (1.0, 2.0, 6.0):
        metrics.add({"loss": torch.tensor(value, requires_grad=True), "plain": value, "both": np.array([value, 1.0])})
    means, batches = metrics.take()
    assert means["loss"] == 3.0
    assert means["plain"] == 3.0
    assert means["both"].tolist() == [3.0, 1.0]
    assert [float(one["loss"]) for one in batches] == [1.0, 2.0, 6.0]
    metrics.add(torch.tensor(7.0))
    assert metrics.take()[0] == {"loss": 7.0}
    assert metrics.take() == ({}, [])


def test_training_metrics_of_many_batches_are_not_kept():
    metrics = TrainingMetrics(keeps_batches=False)
    for value in range(250):
        metrics.add({"loss": torch.tensor(float(value))})
        assert len(metrics._waiting) < 100
    means, batches = metrics.take()
    assert means == {"loss": 124.5}
    assert batches == []


def test_what_has_no_mean_is_none():
    metrics = TrainingMetrics(keeps_batches=False)
    for text in ("a", "b"):
        metrics.add({"text": text, "loss": 1.0})
    assert metrics.take()[0] == {"text": None, "loss": 1.0}


def test_nothing_is_no_number():
    metrics = TrainingMetrics(keeps_batches=False)
    for value in (None, 1.0):
        metrics.add({"sometimes": value, "digits": "1.5"})
    assert metrics.take()[0] == {"sometimes": None, "digits": None}


def test_metrics_are_what_they_were_at_their_batch():
    """Not what the parameter, its part, the buffer or the array has become since."""
    weight, buffer, array = torch.nn.Parameter(torch.zeros(2)), torch.zeros(()), np.zeros(())
    training, validation = TrainingMetrics(keeps_batches=False), ValidationMetrics()
    for _ in range(3):
        found = {"weight": weight, "part": weight[0], "buffer": buffer, "loss": (2 * weight).sum()}
        training.add({**found, "array": array})
        validation.add(found, 1)
        with torch.no_grad():
            weight += 1
            buffer += 1
            array += 1
    means, _ = training.take()
    assert means.pop("weight").tolist() == [1.0, 1.0]
    assert means == {"part": 1.0, "buffer": 1.0, "loss": 4.0, "array": 1.0}
    assert [one["buffer"].item() for one in validation.outputs] == [0.0, 1.0, 2.0]
    assert [one["weight"].tolist() for one in validation.outputs] == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]


def test_metrics_may_be_of_low_precision():
    low = torch.tensor([1.5], dtype=torch.bfloat16)
    training, validation = TrainingMetrics(keeps_batches=True), ValidationMetrics()
    for value in (low, torch.ones(2, dtype=torch.bfloat16)):
        training.add({"ragged": value})
    assert training.take()[0] == {"ragged": None}
    validation.add({"loss": low}, 1)
    assert over_ranks([validation.partial(lambda names: {"loss": Reducer.AVG})])["loss"].tolist() == [1.5]


def test_metrics_have_the_same_names_each_time():
    metrics = TrainingMetrics(keeps_batches=False)
    metrics.add({"loss": 1.0})
    with pytest.raises(ArgumentError, match="returned the metrics accuracy, and loss before"):
        metrics.add({"accuracy": 1.0})
    with pytest.raises(ArgumentTypeError, match=r"train_batch\(\) returned a NoneType"):
        metrics.add(None)


def test_mean_over_ranks_leaves_out_who_has_none():
    assert mean_over_ranks([{"a": 1.0, "b": None}, {"a": 3.0, "b": None}, {"a": None, "b": None}]) == {
        "a": 2.0,
        "b": None,
    }
    assert mean_over_ranks([{"a": "x", "b": np.zeros(1)}, {"a": "y", "b": np.zeros(2)}]) == {"a": None, "b": None}


VALUES, BATCHES = [0.25, 0.5, 0.75, 1, 25.5, 1.9], [1, 2, 5, 4, 5, 6]


def test_means_are_weighted():
    assert round(reduced(Reducer.AVG, VALUES, [1] * 6), 2) == 4.98
    assert round(reduced(Reducer.AVG, VALUES, BATCHES), 2) == 6.43
    assert reduced(Reducer.SUM, VALUES, BATCHES) == 29.9
    assert (reduced(Reducer.MAX, VALUES, BATCHES), reduced(Reducer.MIN, VALUES, BATCHES)) == (25.5, 0.25)


def test_validation_does_not_depend_on_who_had_which_batch():
    reducers = {"a": Reducer.AVG, "most": Reducer.MAX}
    batches = [({"a": torch.tensor(float(number)), "most": number}, number + 1) for number in range(5)]

    def part(chosen):
        found = ValidationMetrics()
        for metrics, num_rows in chosen:
            found.add(metrics, num_rows)
        return found.partial(lambda names: reducers)

    alone = over_ranks([part(batches)])
    assert alone == pytest.approx({"a": (0 + 2 + 6 + 12 + 20) / 15, "most": 4})
    assert over_ranks([part(batches[::2]), part(batches[1::2]), part([])]) == pytest.approx(alone)


def test_validation_that_cannot_be():
    with pytest.raises(ArgumentError, match="The validation data is empty"):
        over_ranks([None, None])
    found = ValidationMetrics()
    with pytest.raises(ArgumentError, match=r"returned None for 'a'"):
        found.add({"a": None}, 1)
    found.add({"a": "text"}, 1)
    with pytest.raises(ArgumentError, match=r"values of the metric 'a' .* cannot be put together"):
        found.partial(lambda names: {"a": Reducer.AVG})
    assert Partial({}, 0, {}) is not None


class Counting(MetricReducer):
    def __init__(self):
        self.reset()

    def reset(self):
        self.count = 0

    def per_slot_reduce(self):
        return self.count

    def cross_slot_reduce(self, per_slot_metrics):
        return sum(per_slot_metrics)


def test_reducers_put_ranks_together_in_the_order_of_batches():
    ranks = [Reducers(), Reducers()]
    for rank, reducers in enumerate(ranks):
        listed = reducers.wrap(list, "all", True, True)
        counting = reducers.wrap(Counting(), "count", False, True)
        for number in range(3 - rank):
            listed.update(2 * number + rank)
            counting.count += 1
    said = [[one.per_slot_reduce() for one, _ in reducers.of(False)] for reducers in ranks]
    assert ranks[0].reduce(False, lambda own: said) == {"all": [0, 1, 2, 3, 4], "count": 5}
    assert [name for _, name in ranks[0].of(True)] == ["all"]
    ranks[0].reset(False)
    assert ranks[0].reduce(False, lambda own: [own]) == {"all": [], "count": 0}


def test_reducers_go_on_after_restarts():
    """What ranks had before counts like that of further ranks, and comes first."""
    reducers = Reducers()
    listed = reducers.wrap(list, "all", True, True)
    reducers.wrap(Counting(), "count", True, True).count = 10
    listed.update(5)
    assert reducers.state(is_training=False) == [[5], 10]
    reducers.former = [[[[0, 2], 1], [[1], 2]], [[[3, 4], 3]]]
    assert reducers.reduce(False, lambda own: [own]) == {"all": [0, 1, 2, 3, 4, 5], "count": 16}


def test_reducers_that_are_wrong():
    reducers, counting = Reducers(), Counting()
    reducers.wrap(counting, "n", True, True)
    with pytest.raises(ArgumentError, match="same reducer twice"):
        reducers.wrap(counting, "m", True, True)
    with pytest.raises(ArgumentTypeError, match=r"given a int; expected a pytorch.MetricReducer or a function"):
        reducers.wrap(3, "m", True, True)
    nameless = Reducers()
    nameless.wrap(sum, None, True, True)
    with pytest.raises(ArgumentError, match="without a name and returned a int"):
        nameless.reduce(True, lambda own: [own])
    named = Reducers()
    named.wrap(lambda values: {"a": 1}, "b", True, True)
    with pytest.raises(ArgumentError, match="'b' returned a dict"):
        named.reduce(True, lambda own: [own])
    raising = Reducers()
    raising.wrap(lambda values: 1 / 0, "c", True, True)
    with pytest.raises(ArgumentError, match=r"cross_slot_reduce.. raised ZeroDivisionError"):
        raising.reduce(True, lambda own: [own])


# --- trials ---------------------------------------------------------------------------------------------------------


class Bare(PyTorchTrial):
    def train_batch(self, batch, epoch_idx, batch_idx):
        return {}

    def build_training_data_loader(self):
        return None

    def build_validation_data_loader(self):
        return None


class Whole(Bare):
    def evaluate_full_dataset(self, data_loader):
        return {}


class Both(Whole):
    def evaluate_batch(self, batch):
        return {"n": batch}


class ByBatch(Bare):
    def evaluate_batch(self, batch, batch_idx):
        return {"index": batch_idx}

    def evaluation_reducer(self):
        return {"index": Reducer.MAX}


def test_trial_has_one_way_to_be_validated():
    assert Evaluation(Whole()).is_whole
    assert not Evaluation(ByBatch()).is_whole
    for trial, said in ((Bare(), "neither of"), (Both(), "both of")):
        with pytest.raises(ArgumentError, match=rf"{said} evaluate_batch"):
            Evaluation(trial)
    with pytest.raises(ArgumentTypeError, match="The trial is a int"):
        Evaluation(3)


def test_validation_returns_metrics():
    assert Evaluation(Whole()).whole([]) == {}
    nothing = Whole()
    nothing.evaluate_full_dataset = lambda data_loader: None
    with pytest.raises(ArgumentTypeError, match=r"evaluate_full_dataset.. returned a NoneType"):
        Evaluation(nothing).whole([])


def test_evaluate_batch_may_want_the_index():
    assert Evaluation(ByBatch()).batch("data", 3) == {"index": 3}
    with pytest.raises(ArgumentError, match=r"evaluation_reducer.. has none for 'loss'"):
        Evaluation(ByBatch()).reducers(["index", "loss"])


def test_rows_of_a_batch():
    trial = ByBatch()
    assert trial.get_batch_length({"x": [torch.zeros(5, 2)], "y": torch.zeros(3)}) == 5
    assert trial.get_batch_length((np.zeros((4, 1)), "text")) == 4
    with pytest.raises(ArgumentError, match="override get_batch_length"):
        trial.get_batch_length(["a", "b"])


def test_batches_are_moved_in_whatever_they_come():
    from collections import namedtuple

    from paceline.pytorch.context import _moved

    Pair = namedtuple("Pair", "x y")
    there = torch.device("meta")
    moved = _moved(
        {"a": [torch.zeros(2), "text"], "b": (np.ones(3), np.array(["t"])), "c": Pair(torch.ones(1), 3)}, there
    )
    assert moved["a"][0].device == moved["b"][0].device == moved["c"].x.device == there
    assert (moved["a"][1], moved["b"][1].tolist(), moved["c"].y) == ("text", ["t"], 3)
    here = torch.zeros(2)
    assert _moved(here, torch.device("cpu")) is here


# --- checkpoints ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("models", "weights"),
        ("optimizers", [1]),
        ("callbacks", [1]),
        ("in_epoch", "x"),
        ("validation", 3),
        ("best", []),
    ],
)
def test_checkpoint_with_parts_of_wrong_types(name, value):
    state = {"batches": 1, "epochs": 0, "records": 2, "seed": 0, "models": [{}], "optimizers": [], "best": {}}
    assert found_in(state).lengths.records == 2
    with pytest.raises(ArgumentError, match=rf"is damaged: {name} is of type {type(value).__name__}; expected a"):
        found_in({**state, name: value})
