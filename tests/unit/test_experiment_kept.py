"""What of an experiment comes back after a restart, of tools and metrics that nobody has thought of."""

import enum
import logging
import math
from collections import defaultdict, deque, namedtuple

import pytest
import torch
import torchmetrics as tm
import typed_experiment

import paceline
from paceline.errors import ArgumentError, CheckpointError
from paceline.experiment import run_experiment
from paceline.experiment.agreement import Agreement, let_agree
from paceline.experiment.keeping import attributes, changes, is_holdable, put_back
from paceline.experiment.measures import computed, restore_states, share_states, states_of


def run(name, *overrides, experiment=typed_experiment.Exact):
    changes = [f"cfg.name={name}", "cfg.start_workers=0", "cfg.num_epochs=1", *overrides]
    return run_experiment(experiment, overrides=changes)


# --- tools -----------------------------------------------------------------------------------------------------------


class Phase(enum.IntEnum):
    WARM, COLD = 1, 2


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize("value", [Phase.COLD, Pair(1, 2), [Phase.COLD], {"a": Pair(1, 2)}])
def test_what_looks_like_a_value_and_is_none_does_not_end_the_training(value):
    """A checkpoint refuses it, which was found out when it was saved."""
    assert not is_holdable(value)
    tool = typed_experiment.Patience()
    first = attributes(tool)
    tool.phase, tool.num_calls = value, 3
    assert changes(tool, first) == {"attributes": {"num_calls": 3}}


class Window:
    def __init__(self, size=3):
        self.values, self.counts = deque(maxlen=size), defaultdict(int)

    def add(self, value):
        self.values.append(value)
        self.counts[value] += 1


def test_containers_of_tools_come_back_as_what_they_were():
    tool, other = Window(), Window()
    first = attributes(tool)
    for value in range(5):
        tool.add(value)
    put_back(other, changes(tool, first))
    other.add(7)
    assert (other.values.maxlen, list(other.values)) == (3, [3, 4, 7])
    assert other.counts[7] == 1


def test_state_inside_a_tool_comes_back():
    class Holder:
        def __init__(self):
            optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
            self.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    tool, other = Holder(), Holder()
    tool.scheduler.last_epoch = 3
    put_back(other, changes(tool, attributes(tool)))
    assert other.scheduler.last_epoch == 3


class Remembering(typed_experiment.Exact):
    def worker_loop(self, dataset_shards):
        self.tools.total = getattr(self.tools, "total", 0) + 1
        self.tools.patience.model = torch.nn.Linear(1, 1)
        for epoch in range(2):
            self.save_checkpoint(epoch)
        return self.tools.total


def test_plain_values_among_the_tools_are_kept(caplog):
    first = run("plain_tool", experiment=Remembering)
    again = run("plain_tool", f"cfg.restore_checkpoint_path={first.path}", experiment=Remembering)
    assert (first.values, again.values) == ([1], [2])
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [text.split(",")[0] for text in told if "checkpoint cannot hold" in text] == [
        "tools.patience: a checkpoint cannot hold model"
    ] * 2
    assert len([text for text in told if "has a state of model, which is not there now" in text]) == 1


@pytest.mark.parametrize("answer", [torch.tensor(True), torch.zeros(2).numpy()[0] == 0])
def test_answer_of_a_tensor_is_agreed_upon(answer):
    class Tool:
        def __call__(self):
            return answer

    tool = Tool()
    let_agree(tool, "tools.tool", Agreement())
    assert tool() is True


# --- metrics ---------------------------------------------------------------------------------------------------------


def test_states_inside_metrics_come_back():
    def made():
        classwise = tm.wrappers.ClasswiseWrapper(tm.classification.MulticlassAccuracy(2, average=None))
        return {"classwise": classwise, "both": tm.SumMetric() + tm.MaxMetric()}

    metrics, other = made(), made()
    metrics["classwise"].update(torch.tensor([0, 1, 0]), torch.tensor([0, 0, 0]))
    metrics["both"].update(torch.tensor(3.0))
    restore_states(other, states_of(metrics))
    assert computed(other, set()) == computed(metrics, set())


class Counting(tm.Metric):
    def __init__(self, reduction):
        super().__init__()
        self.add_state("num", torch.tensor(0.0), dist_reduce_fx=reduction)

    def update(self, num):
        self.num += num

    def compute(self):
        return self.num


def test_sum_in_words_of_the_user_counts_once_after_a_resize():
    def made(*values):
        metric = Counting(lambda all_ranks: all_ranks.sum(0))
        for value in values:
            metric.update(torch.tensor(value))
        return {"num": metric}

    parts, ranks = [states_of(made(1.0)), states_of(made(2.0))], [made() for _ in range(3)]
    for rank, metrics in enumerate(ranks):
        assert share_states(metrics, parts, rank, 3) == []
    assert [metrics["num"].num.item() for metrics in ranks] == [3.0, 0.0, 0.0]


def test_metric_that_cannot_be_shared_begins_anew():
    def made(*values):
        metric = Counting(None)
        for value in values:
            metric.update(torch.tensor(value))
        return {"num": metric}

    target = made()
    assert share_states(target, [states_of(made(1.0)), states_of(made(2.0))], 0, 1) == ["num"]
    assert not target["num"].update_called
    assert share_states(target, [states_of(made(4.0)), states_of(made())], 0, 1) == []
    assert target["num"].compute().item() == 4.0


# --- checkpoints -----------------------------------------------------------------------------------------------------


def test_best_metric_does_not_stand_against_a_checkpoint_inside_an_epoch():
    trained = run("inside", "cfg.save_every=1", "cfg.best_metric=mse", "cfg.keep_checkpoints=1")
    kept = paceline.load_run(trained.path).checkpoints
    assert [math.isnan(one.score) for one in kept] == [False]


def test_best_metric_may_be_the_epoch():
    trained = run("by_epoch", "cfg.best_metric=epoch", "cfg.best_mode=max", "cfg.num_epochs=2")
    assert [one.score for one in paceline.load_run(trained.path).checkpoints] == [0.0, 1.0]


def test_best_metric_that_is_none_is_told_in_words():
    with pytest.raises(ArgumentError, match=r"cfg.best_metric is 'msee'.*\(epoch, mse\)"):
        run("no_best", "cfg.best_metric=msee")


def save_forged(**state):
    def save():
        paceline.save_checkpoint(**state)

    with paceline.Trainer(num_workers=0, logdir="forged") as trainer:
        trainer.run(save)
        return trainer.latest_checkpoint_path


def test_forged_checkpoint_is_refused_in_words():
    path = save_forged(models={}, optimizers={}, epoch=0, kept={})
    with pytest.raises(CheckpointError, match="expected one that an experiment's save_checkpoint wrote"):
        run("from_forged", f"cfg.restore_checkpoint_path={path}")
