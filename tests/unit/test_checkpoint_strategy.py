"""Which checkpoints are best, and which may go."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.checkpoints import CheckpointInfo, CheckpointStrategy, ranked, to_delete
from paceline.errors import ArgumentError


def infos(*scores):
    return [CheckpointInfo(id, f"/c/{id}", score, id, 1000.0, 1) for id, score in enumerate(scores, start=1)]


def ids(infos):
    return [info.id for info in infos]


def by_loss(order="max", **kwargs):
    return CheckpointStrategy(checkpoint_score_attribute="loss", checkpoint_score_order=order, **kwargs)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"num_to_keep": -1}, "num_to_keep is -1"),
        ({"num_to_keep": 1.0}, "num_to_keep is 1.0"),
        ({"num_to_keep": True}, "num_to_keep is True"),
        ({"num_to_keep": "2"}, "num_to_keep is '2'"),
        ({"checkpoint_score_order": "best"}, "give 'max' or 'min'"),
        ({"checkpoint_score_order": None}, "give 'max' or 'min'"),
        ({"checkpoint_score_attribute": None}, "checkpoint_score_attribute is None"),
        ({"checkpoint_score_attribute": ""}, "checkpoint_score_attribute is ''"),
        ({"storage_path": 3}, "storage_path is 3"),
        ({"storage_path": ""}, "storage_path is ''"),
        ({"storage_path": "memory://"}, "'memory://', which names no place"),
        ({"storage_path": "s3:///"}, "names no place"),
    ],
)
def test_bad_strategy(arguments, said):
    with pytest.raises(ArgumentError, match=said):
        CheckpointStrategy(**arguments)


def test_positional_and_keyword_arguments_and_defaults():
    assert CheckpointStrategy() == CheckpointStrategy(None, "_timestamp", "max", None)
    assert CheckpointStrategy(2, "loss", "min", "s3://b").num_to_keep == 2
    assert CheckpointStrategy(storage_path=Path("/x")).storage_path == "/x"


@pytest.mark.parametrize(
    "number",
    [1, 1.0, np.float32(1), np.int64(1), np.array(1), torch.tensor(1), torch.tensor(1.0, requires_grad=True)],
)
def test_score_is_any_single_number(number):
    score = by_loss().score_of({"loss": number})
    assert score == 1.0
    assert type(score) is float


@pytest.mark.parametrize("value", ["1", None, True, [1], torch.ones(2), np.ones(1), 1j, torch.tensor(True), 10**400])
def test_score_is_no_number(value):
    with pytest.raises(ArgumentError, match=r"ranks by 'loss', but that is a \w+"):
        by_loss().score_of({"loss": value})


def test_score_attribute_is_missing():
    with pytest.raises(ArgumentError, match="it got: 'epoch', 'model'"):
        by_loss().score_of({"epoch": 1, "model": {}})
    with pytest.raises(ArgumentError, match="it got: none"):
        by_loss().score_of({})


def test_time_needs_no_key_and_ignores_one():
    assert CheckpointStrategy().score_of({}) is None
    assert CheckpointStrategy().score_of({"_timestamp": "whatever"}) is None


def test_newest_is_best_by_default():
    assert ids(ranked(infos(None, None, None), CheckpointStrategy())) == [3, 2, 1]
    assert ids(ranked(infos(None, None), CheckpointStrategy(checkpoint_score_order="min"))) == [1, 2]


@pytest.mark.parametrize(("order", "expected"), [("max", [2, 3, 1]), ("min", [1, 3, 2])])
def test_order(order, expected):
    assert ids(ranked(infos(1.0, 3.0, 2.0), by_loss(order))) == expected


@pytest.mark.parametrize(("order", "expected"), [("max", [5, 2, 4, 3, 1]), ("min", [2, 5, 4, 3, 1])])
def test_nan_and_no_score_are_worst_in_both_orders(order, expected):
    assert ids(ranked(infos(math.nan, -math.inf, None, math.nan, math.inf), by_loss(order))) == expected


@pytest.mark.parametrize("order", ["max", "min"])
def test_of_equals_the_newer_is_better(order):
    assert ids(ranked(infos(1.0, 1.0, 1.0), by_loss(order))) == [3, 2, 1]
    assert ids(to_delete(infos(1.0, 1.0, 1.0), by_loss(order, num_to_keep=1))) == [2, 1]


def test_best_ones_and_the_latest_are_kept():
    assert ids(to_delete(infos(5.0, 1.0, 4.0, 2.0), by_loss(num_to_keep=2))) == [2]  # 1 and 3 are best, 4 the latest
    assert ids(to_delete(infos(5.0, 1.0, 2.0), by_loss("min", num_to_keep=1))) == [1]
    assert ids(to_delete(infos(None, None, None, None), CheckpointStrategy(num_to_keep=2))) == [2, 1]


@pytest.mark.parametrize("num_to_keep", [None, 0, 3, 10])
def test_nothing_to_delete(num_to_keep):
    assert to_delete(infos(1.0, 2.0, 3.0), by_loss(num_to_keep=num_to_keep)) == []
    assert to_delete([], by_loss(num_to_keep=num_to_keep)) == []


def test_spared_checkpoint_is_kept_though_it_is_neither_best_nor_latest():
    strategy = by_loss(num_to_keep=1)
    assert ids(to_delete(infos(1.0, 9.0, 2.0, 3.0), strategy)) == [3, 1]
    assert ids(to_delete(infos(1.0, 9.0, 2.0, 3.0), strategy, spare_id=1)) == [3]
