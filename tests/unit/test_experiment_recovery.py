"""With which arguments the defaults of a typed experiment were made."""

# ruff: noqa: B006, B008 - objects as defaults are the point

import dataclasses
import functools
import math
import pathlib

import pytest
import torch
import torchmetrics as tm
from torch import nn
from torch.optim import Adam

from paceline.experiment import DUMMY_PARAMS
from paceline.experiment.recovery import Call, Kept, by_attributes, explicit, recover, written
from paceline.experiment.schema import MISSING, Node, as_plain, node_of


class Leaf:
    def __init__(self, a=1, b=2):
        self.a = a


class Says:
    def __init__(self, depth):
        self._depth = depth

    def __config__(self):
        return {"depth": self._depth}


@dataclasses.dataclass
class Point:
    x: int = 0
    y: int = 0


class Hidden:
    """Keeps nothing under the name of its argument."""

    def __init__(self, size):
        self.twice = 2 * size


SHARED = Leaf(7)
WIDTH = 5


def make_leaf():
    return Leaf(9)


class Owner:
    DEPTH = 4

    def __init__(
        self,
        by_position=Leaf(3, 4),
        by_keyword=Leaf(b=math.floor(2.5)),
        by_name=SHARED,
        of_constants=Leaf(WIDTH, DEPTH),
        nested=nn.Sequential(nn.Linear(2, 3), nn.ReLU()),
        says=Says(5),
        point=Point(1, 2),
        by_function=make_leaf(),
        hidden=Hidden(3),
        listed=[Leaf(1), Leaf(2)],
        lr=Adam(DUMMY_PARAMS, lr=3e-4),
        factory=tm.Accuracy(task="multiclass", num_classes=3),
        recurrent=nn.LSTM(4, hidden_size=8),
        function=torch.relu,
        with_function=Leaf(1, torch.relu),
        of_values=Leaf(pathlib.Path("x"), dict(n=1)),
        partial=functools.partial(torch.relu, 1),
        several=nn.Sequential(nn.Sequential(nn.ReLU())),
        unwritable=[Leaf(torch.relu), object()],
    ):
        pass


@dataclasses.dataclass
class Container:
    leaf: Leaf = dataclasses.field(default_factory=Leaf)
    other: Leaf = dataclasses.field(default_factory=lambda: Leaf(8))
    names: list = dataclasses.field(default_factory=list)


def default(name):
    return Owner.__init__.__defaults__[Owner.__init__.__code__.co_varnames.index(name) - 1]


def recovered(name):
    return recover(Owner, name, default(name))


def test_arguments_are_those_of_the_source():
    assert recovered("by_position") == Call(Leaf, kwargs={"a": 3, "b": 4}, how="source")
    assert recovered("by_keyword") == Call(Leaf, kwargs={"b": 2}, how="source")
    assert recovered("by_name") == Call(Leaf, kwargs={"a": 7}, how="source")
    assert recovered("of_constants") == Call(Leaf, kwargs={"a": 5, "b": 4}, how="source")
    assert recovered("of_values") == Call(Leaf, kwargs={"a": pathlib.Path("x"), "b": {"n": 1}}, how="source")
    assert [one.kwargs for one in recovered("listed")] == [{"a": 1}, {"a": 2}]


def test_positional_arguments_without_names_stay_positional():
    nested = recovered("nested")
    assert [(one.target, one.kwargs) for one in nested.args] == [
        (nn.Linear, {"in_features": 2, "out_features": 3}),
        (nn.ReLU, {}),
    ]
    assert (recovered("recurrent").args, recovered("recurrent").kwargs) == ((4,), {"hidden_size": 8})


def test_object_says_itself_how_it_was_made():
    assert recovered("says") == Call(Says, kwargs={"depth": 5}, how="__config__")
    assert recovered("point") == Call(Point, kwargs={"x": 1, "y": 2}, how="dataclass")
    assert explicit(Leaf()) is None


def test_what_a_function_made_is_known_by_its_attributes():
    assert written(Owner, "by_function", default("by_function")) is None
    assert recovered("by_function") == Call(Leaf, kwargs={"a": 9}, how="attributes")
    assert by_attributes(Adam(DUMMY_PARAMS, lr=0.5)).kwargs["lr"] == 0.5


def test_what_nobody_knows_is_missing_and_named():
    lost = by_attributes(Hidden(3))
    assert lost.unknown == ("size",)
    assert as_plain(node_of(Hidden, lost))["size"] == MISSING


def test_object_that_was_replaced_since_is_not_what_the_source_says():
    assert written(Owner, "by_position", Says(1)) is None


def test_function_stays_in_the_code():
    assert recovered("function") == Kept(torch.relu)


def test_tree_has_the_defaults_of_every_class_in_it():
    tree = as_plain(node_of(Owner))
    assert tree["hidden"]["size"] == 3
    assert tree["lr"]["lr"] == 3e-4
    assert tree["lr"]["params"] == MISSING
    assert tree["lr"]["betas"] == [0.9, 0.999]
    assert tree["factory"]["_target_"] == "torchmetrics.classification.accuracy.Accuracy"
    assert (tree["factory"]["num_classes"], tree["factory"]["top_k"]) == (3, 1)
    assert tree["nested"]["_args_"][0]["out_features"] == 3
    assert "function" not in tree


def test_class_without_source_is_read_from_its_signature():
    namespace = {}
    exec("class Made:\n    def __init__(self, a: int, b: int = 2): self.a = a", namespace)
    made = namespace["Made"]
    made.__module__ = __name__
    assert as_plain(node_of(made)) == {"_target_": f"{__name__}.Made", "a": MISSING, "b": 2}
    assert by_attributes(made(5)).kwargs == {"a": 5}


def test_default_that_needs_its_own_class_is_refused_in_words():
    class Outer:
        def __init__(self, inner=Leaf()):
            pass

    assert isinstance(node_of(Outer).field("inner").value, Node)
    from paceline.errors import ConfigError

    with pytest.raises(ConfigError, match="inside a function"):
        as_plain(node_of(Outer))


def test_function_in_a_call_stays_in_the_code_if_it_has_a_name():
    assert recovered("with_function") == Call(Leaf, kwargs={"a": 1, "b": Kept(torch.relu)}, how="source")
    assert as_plain(node_of(Leaf, recovered("with_function"))) == {"_target_": f"{__name__}.Leaf", "a": 1}
    assert isinstance(recovered("partial"), Kept)
    assert isinstance(recovered("unwritable"), Kept)


def test_class_may_come_again_inside_itself():
    tree = as_plain(node_of(Owner))["several"]
    assert tree["_args_"][0]["_args_"][0]["_target_"].endswith("ReLU")


def test_factories_of_a_dataclass_are_defaults():
    leaf = f"{__name__}.Leaf"
    assert as_plain(node_of(Container)) == {
        "_target_": f"{__name__}.Container",
        "leaf": {"_target_": leaf, "a": 1, "b": 2},
        "other": {"_target_": leaf, "a": 8, "b": 2},
        "names": [],
    }
