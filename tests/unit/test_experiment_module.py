"""BaseModule and what it stands on, in this process."""

import logging
from types import SimpleNamespace

import pytest
import torch
import torchmetrics as tm
import typed_experiment

import paceline
from paceline.errors import ArgumentError, CheckpointError, ConfigError
from paceline.experiment import (
    TrainConfig,
    build_experiment,
    get_device,
    load,
    prepare_model,
    run_experiment,
    schema_of,
)
from paceline.experiment.agreement import Agreement, let_agree
from paceline.experiment.building import mapping_of
from paceline.experiment.keeping import changes, is_holdable, put_back
from paceline.experiment.measures import restore_states, share_states, states_of
from paceline.experiment.shards import shards_of
from paceline.experiment.stages import Stages, epoch_line

SCHEMA = schema_of(typed_experiment.Experiment)


def made(*overrides, experiment=typed_experiment.Experiment):
    return build_experiment(load(schema_of(experiment), "", overrides))


def run(name, *overrides, experiment=typed_experiment.Experiment):
    changes = [f"cfg.name={name}", "cfg.start_workers=0", "cfg.num_epochs=2", *overrides]
    return run_experiment(experiment, overrides=changes)


# --- models and optimizers -------------------------------------------------------------------------------------------


def test_model_without_an_optimizer_is_frozen():
    experiment = made()
    assert not experiment.models.teacher.training
    assert not any(one.requires_grad for one in experiment.models.teacher.parameters())
    assert all(one.requires_grad for one in experiment.models.net.parameters())


def test_optimizer_that_goes_its_own_way_on_each_rank_is_told(caplog):
    experiment = made()
    experiment.optimizers.exact = torch.optim.LBFGS(experiment.models.net.parameters())
    experiment._warn_of_own_ways()
    assert [record.getMessage()[:33] for record in caplog.records] == ["optimizers.exact is an LBFGS, whi"]


def test_none_instead_of_an_optimizer_freezes_a_model_too():
    models = typed_experiment.Models()
    models.map_params_to_optimizers = {"net": "sgd", "teacher": None}
    assert mapping_of(models, ["sgd"]) == {"net": ["sgd"], "teacher": []}


def test_one_optimizer_has_a_group_for_each_of_its_models():
    experiment = made(experiment=typed_experiment.Several)
    assert experiment.worker_loop(None) == [[2, 2, 2], [2]]
    rates = [[group["lr"] for group in one.param_groups] for one in vars(experiment.optimizers).values()]
    assert rates == [[0.1] * 3, [0.2]]


@pytest.mark.parametrize(
    ("mapping", "told"),
    [
        ({"nett": "sgd"}, "names the model 'nett'. Did you mean 'net'"),
        ({"net": "sdg"}, "names the optimizer 'sdg'. Did you mean 'sgd'"),
        ({"net": 3}, "maps 'net' to 3; expected the name of an optimizer"),
        ({"net": ["sgd", None]}, "expected the name of an optimizer"),
        (None, "expected a dict"),
    ],
)
def test_wrong_mapping_is_refused_in_words(mapping, told):
    models = typed_experiment.Models()
    models.map_params_to_optimizers = mapping
    with pytest.raises(ConfigError, match=told):
        mapping_of(models, ["sgd"])


def test_loss_and_metric_of_one_name_are_refused():
    losses, metrics = typed_experiment.Losses(), typed_experiment.Metrics()
    metrics.mse = tm.MeanSquaredError()

    class Experiment(typed_experiment.Experiment):
        def __init__(self):
            typed_experiment.BaseModule.__init__(self, TrainConfig(), losses=losses, metrics=metrics)

    with pytest.raises(ArgumentError, match="mse: a loss and a metric"):
        Experiment()


# --- data ------------------------------------------------------------------------------------------------------------


def test_loaders_are_in_the_order_of_datasets_and_know_their_length():
    experiment = made()
    loaders = experiment.generate_loaders(shards_of(experiment.datasets))
    assert [len(loader) for loader in loaders] == [6, 3]
    batches = list(loaders[1])
    assert [batch["x"].flatten().tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]


def test_shards_have_the_methods_of_ray_data():
    shards = shards_of(made().datasets)
    sizes = [len(batch[0]) for batch in shards.val.iter_torch_batches(batch_size=5, prefetch_batches=1)]
    assert sizes == [5, 4]
    rows = [batch for batch in shards.val.iter_torch_batches(batch_size=5, collate_fn=lambda batch: len(batch["item"]))]
    assert rows == [5, 4]


def test_dataset_that_says_so_is_shuffled_anew_in_each_epoch():
    [train, _] = (experiment := made()).generate_loaders(shards_of(experiment.datasets))
    first, second = ([x for batch in train for x in batch["x"].flatten().tolist()] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(24))
    assert first != second


# --- reports ---------------------------------------------------------------------------------------------------------


def test_each_batch_is_one_report_with_losses_and_metrics():
    metrics = paceline.load_run(run("reports").path).metrics
    assert len(metrics) == 2 * (6 + 1)
    first = metrics.iloc[0]
    assert (first["epoch"], first["batch"]) == (0, 0)
    assert {"mse", "mae"} <= set(metrics.columns)
    assert "unused" not in metrics.columns


def test_only_each_so_many_batches_are_reported():
    metrics = paceline.load_run(run("few_reports", "cfg.log_every=4").path).metrics
    assert metrics[metrics["batch"].notna()]["batch"].tolist() == [0, 4, 0, 4]


def test_metric_that_is_never_updated_is_named_once(caplog):
    experiment = made()
    experiment.losses.mse.update(torch.zeros(2), torch.ones(2))
    with caplog.at_level(logging.WARNING):
        values = [experiment.save_metrics_and_losses(epoch=0, report=False) for _ in range(2)]
    assert values[0] == {"epoch": 0, "mse": 1.0}
    assert [record.getMessage().split()[0] for record in caplog.records] == ["mae", "unused"]


def test_line_of_an_epoch():
    values = {"epoch": 2, "loss": 0.123456, "accuracy": 0.5, "hidden": 1.0, "matrix": torch.zeros(2)}
    line = epoch_line(2, 10, values, {"train": 1.24}, {"acc*": ".0%", "hidden": ""})
    assert line == "epoch 3/10 | train 1.2 s | loss 0.1235 | accuracy 50%"


def test_stages_are_added_up_until_they_are_taken():
    stages = Stages()
    for name in ("a", "b", "a"):
        with stages.stage(name):
            pass
    assert list(stages.taken()) == ["a", "b"]
    assert stages.taken() == {}


# --- checkpoints -----------------------------------------------------------------------------------------------------


def test_checkpoint_goes_on_in_another_run():
    first = run("first", "cfg.seed=3")
    both = run("both", "cfg.seed=3", "cfg.num_epochs=4")
    second = run("second", "cfg.seed=3", "cfg.num_epochs=4", f"cfg.restore_checkpoint_path={first.path}")
    assert second.values == both.values
    assert paceline.load_run(second.path).metrics["epoch"].min() == 2


def test_seed_that_no_generator_takes_is_refused_before_there_is_a_run():
    for seed in (-1, 2**70):
        with pytest.raises(ArgumentError, match=r"seed=.*expected an integer from 0 to"):
            run("seeded", f"cfg.seed={seed}")
    assert run("seeded").path.name == "run_001"


@pytest.mark.parametrize("change", ["num_epochs=-1", "start_epoch=-1", "prefetch_batches=-1", "log_every=0"])
def test_numbers_with_which_a_loop_would_do_nothing_are_refused(change):
    name, _, value = change.partition("=")
    with pytest.raises(ConfigError, match=rf"cfg\.{name} is {value}: expected \d or more"):
        run("refused", f"cfg.{change}")


def test_random_generators_go_on_without_a_seed_of_the_run():
    def save_and_restore():
        experiment = made()
        experiment.enter_worker()
        torch.manual_seed(5)
        experiment.save_checkpoint(epoch=3, metrics={"mse": 0.5})
        drawn = torch.rand(3).tolist()
        assert experiment.restore_checkpoint()
        return drawn == torch.rand(3).tolist(), experiment.cfg.start_epoch

    with paceline.Trainer(num_workers=0, logdir="generators") as trainer:
        assert trainer.run(save_and_restore) == [(True, 4)]


def test_best_checkpoints_are_kept():
    trained = run("best", "cfg.num_epochs=4", "cfg.keep_checkpoints=1", "cfg.best_metric=mse")
    assert 1 <= len(paceline.load_run(trained.path).checkpoints) <= 2


def test_checkpoint_of_other_models_is_refused():
    path = paceline.load_run(run("others").path).latest_checkpoint_path
    with pytest.raises(CheckpointError, match="has the models net, teacher; the experiment has a, b, c"):
        run("not_mine", f"cfg.restore_checkpoint_path={path}", experiment=typed_experiment.Several)


def test_run_without_a_checkpoint_cannot_be_gone_on_from():
    path = run("saves_nothing", experiment=typed_experiment.Several).path
    with pytest.raises(ConfigError, match="has no checkpoint"):
        run("from_nothing", f"cfg.restore_checkpoint_path={path}")


@pytest.mark.parametrize("name", ["a/b", "..", "''"])
def test_name_must_be_that_of_a_folder(name):
    with pytest.raises(ConfigError, match="expected the name of a folder"):
        run(name)


def test_what_changed_in_a_tool_is_kept_and_what_was_configured_is_not():
    tool = typed_experiment.Patience(most=5)
    first = dict(vars(tool))
    tool(3)
    kept = changes(tool, first)
    other = typed_experiment.Patience(most=7)
    put_back(other, kept)
    assert (other.most, other.num_calls) == (7, 1)


def test_tool_with_a_state_dict_is_kept_by_it():
    layer, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    put_back(other, changes(layer, {}))
    assert torch.equal(layer.weight, other.weight)


class Schedule:
    """As people wrap schedulers of torch, and averages of weights."""

    def __init__(self, optimizer=None):
        self.optimizer, self.best, self.seen = optimizer, tm.MaxMetric(), SimpleNamespace(num=0)
        self.inner = optimizer and torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def test_objects_inside_a_tool_are_kept_by_their_state():
    def schedule():
        return Schedule(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0))

    tool, other = schedule(), schedule()
    tool.optimizer.step()
    tool.inner.step()
    kept = changes(tool, {}, elsewhere={id(tool.optimizer)})
    assert {*kept["inside"]} == {"inner"}, "metrics are kept with the other metrics"
    assert put_back(other, kept) == []
    assert other.inner.last_epoch == 1
    assert put_back(Schedule(), kept) == ["inner"]


def test_what_a_tool_loses_is_said_once(caplog):
    experiment = made()
    experiment.tools.schedule = Schedule()
    experiment.enter_worker()
    experiment.tools.schedule.seen.num += 1
    experiment.tools.schedule.inner = torch.nn.Linear(1, 1)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        experiment._kept()
        experiment._kept()
    assert [one.getMessage().partition(", so")[0] for one in caplog.records] == [
        "tools.schedule: a checkpoint cannot hold inner, seen"
    ]


def test_values_of_validation_have_names_of_their_own():
    experiment = made()
    experiment.losses.mse.update(torch.ones(2), torch.zeros(2))
    assert experiment.save_losses(0, prefix="val_") == {"epoch": 0, "val_mse": 1.0}


def test_what_a_checkpoint_can_hold():
    assert is_holdable({"a": [1, (2.0, None)], "b": torch.zeros(1)})
    assert not is_holdable([object()])
    assert not is_holdable(torch.nn.Linear(1, 1))


def test_unknown_state_is_refused_when_it_is_registered():
    with pytest.raises(ArgumentError, match="no attribute 'histroy'"):
        made().register_stateful("histroy")


def metrics_of(*values):
    metrics = {"sum": tm.SumMetric(), "max": tm.MaxMetric(), "cat": tm.CatMetric()}
    for value in values:
        for metric in metrics.values():
            metric.update(float(value))
    return metrics


def test_states_of_metrics_come_back():
    kept, other = states_of(metrics_of(1, 2)), metrics_of()
    restore_states(other, kept)
    assert [other[name].compute().tolist() for name in other] == [3.0, 2.0, [1.0, 2.0]]
    assert all(metric.update_called for metric in other.values())


def test_states_of_two_ranks_are_shared_among_three_so_that_nothing_counts_twice():
    parts = [states_of(metrics_of(1, 2)), states_of(metrics_of(5))]
    ranks = [metrics_of() for _ in range(3)]
    for rank, metrics in enumerate(ranks):
        assert share_states(metrics, parts, rank, 3) == []
    assert [metrics["sum"].metric_state["sum_value"].item() for metrics in ranks] == [8.0, 0.0, 0.0]
    assert [metrics["max"].metric_state["max_value"].item() for metrics in ranks] == [5.0, 5.0, 5.0]
    assert [len(metrics["cat"].metric_state["value"]) for metrics in ranks] == [3, 0, 0]


def pearsons(*pairs):
    metric = tm.PearsonCorrCoef()
    for x, y in pairs:
        metric.update(torch.tensor(x), torch.tensor(y))
    return {"r": metric}


def test_states_without_a_reduction_go_to_as_many_ranks_or_begin_anew():
    parts = [states_of(pearsons(([1.0, 2.0], [2.0, 1.0]))), states_of(pearsons(([3.0, 4.0], [9.0, 5.0])))]
    three = [pearsons() for _ in range(3)]
    assert [share_states(metrics, parts, rank, 3) for rank, metrics in enumerate(three)] == [[]] * 3
    assert [metrics["r"].n_total.sum().item() for metrics in three] == [2.0, 2.0, 0.0]
    one = pearsons(([7.0, 8.0], [1.0, 2.0]))
    assert share_states(one, parts, 0, 1) == ["r"]
    assert not one["r"].update_called
    assert share_states(one, [states_of(pearsons())] * 2, 0, 1) == []  # nobody has counted: nothing is lost


class Averages:
    """A tool that holds a metric, a model of its own, and one of the experiment's."""

    def __init__(self, model=None):
        self.seen, self.ema, self.model = tm.SumMetric(), torch.nn.Linear(1, 1), model
        self.num_steps = 0


def with_averages():
    experiment = made()
    experiment.tools.averages = Averages(experiment.models.net)
    experiment.tools.mean = tm.MeanMetric()
    experiment.best = tm.MaxMetric()
    experiment.register_stateful("best")
    experiment.enter_worker()
    return experiment


def test_metrics_and_models_of_tools_come_back():
    def save_and_restore():
        first, second = with_averages(), with_averages()
        for value in (1.0, 4.0):
            first.tools.averages.seen.update(value)
            first.tools.mean.update(value)
            first.best.update(value)
        first.tools.averages.num_steps = 2
        first.save_checkpoint(epoch=0)
        assert second.restore_checkpoint()
        kept = paceline.load_checkpoint()["kept"]["tools"]["averages"]["inside"]
        tools = second.tools
        assert torch.equal(tools.averages.ema.weight, first.tools.averages.ema.weight)
        assert torch.equal(second.models.net.head[0].weight, first.models.net.head[0].weight)
        values = tools.averages.seen.compute().item(), tools.mean.compute().item(), second.best.compute().item()
        return values, tools.averages.num_steps, sorted(kept)

    with paceline.Trainer(num_workers=0, logdir="tools") as trainer:
        assert trainer.run(save_and_restore) == [((5.0, 2.5, 4.0), 2, ["ema"])]


# --- tools -----------------------------------------------------------------------------------------------------------


def test_tool_that_agrees_stays_what_it_was():
    tool = typed_experiment.Patience(most=1)
    for _ in range(2):
        let_agree(tool, "tools.patience", Agreement())
    assert isinstance(tool, typed_experiment.Patience)
    assert type(tool).__qualname__ == "Patience"
    assert (tool(0), tool(2), tool.num_calls) == (False, True, 2)


def test_tool_that_is_no_decision_is_left_alone():
    class Alone(typed_experiment.Patience):
        agree = False

    for tool in (Alone(), torch.nn.Linear(1, 1), len, object()):
        kind = type(tool)
        let_agree(tool, "tools.one", Agreement())
        assert type(tool) is kind


def test_helpers_are_those_of_paceline():
    assert prepare_model is paceline.prepare_model
    assert get_device is paceline.get_device
