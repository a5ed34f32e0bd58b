"""Metrics as curves: what counts after a restart, and files of any kind."""

import math

from paceline.runs.summary import Curve, Summary, collect, read_lines, spread


def line(step, attempt, *ranks):
    return {"step": step, "attempt": attempt, "ranks": list(ranks)}


def test_first_rank_that_has_it():
    lines = [line(1, 0, {"a": 1}, {"a": 2, "b": 3}), line(2, 0, None, {"a": 4})]
    assert collect(lines) == {"a": ([1, 2], [1, 4]), "b": ([1], [3])}
    assert collect(lines, rank=1) == {"a": ([1, 2], [2, 4]), "b": ([1], [3])}
    assert collect(lines, rank=5) == {}


def test_steps_that_are_made_again_count_once():
    lines = [*(line(step, 0, {"a": step}) for step in range(1, 6)), line(3, 1, {"a": 30}), line(9, 0, {"a": 9})]
    assert collect(lines) == {"a": ([1, 2, 3], [1, 2, 30])}


def test_what_is_no_number():
    lines = [line(1, 0, {"a": "x", "b": True, "c": None, "d": [1]}), line("x", 0, {"a": 1}), {"step": 1}, line(2, 0, 7)]
    [(name, (steps, values))] = collect(lines).items()
    assert (name, steps, math.isnan(values[0])) == ("c", [1], True)


def test_lines_in_blocks_and_a_torn_end(tmp_path):
    (tmp_path / "x").write_bytes(b'{"a": 1}\n' * 300_000 + b'nonsense\n[1]\n{"a": 2}\n{"a"')
    found = list(read_lines(str(tmp_path / "x")))
    assert (len(found), found[-1]) == (300_001, {"a": 2})
    assert list(read_lines(str(tmp_path / "none"))) == []


def test_spread_has_both_ends():
    assert spread(range(1000), 5) == (0, 250, 500, 749, 999)
    assert spread([1.0], 5) == (1.0,)


def test_key_metric():
    def of(*names, score=None):
        return Summary(metrics={name: Curve(0.0, 0.0, 0.0) for name in names}, score=score).key_metric

    assert of("epoch", "acc", "train_loss", "val_loss") == "val_loss"
    assert of("epoch", "acc", "train_loss") == "train_loss"
    assert of("epoch", "acc") == "acc"
    assert of("epoch") is None
    assert of("acc", "val_loss", score="acc") == "acc"
    assert of("val_loss", score="_timestamp") == "val_loss"
