"""Metrics as curves: what counts after a restart, and files of any kind."""

import math

from paceline.json_text import encode_line
from paceline.runs.index import find_runs
from paceline.runs.index_file import IndexFile
from paceline.runs.json_lines import JsonLinesReader, read_last_lines, read_lines
from paceline.runs.summary import Curve, Summary, collect, spread, summarize


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


def test_what_has_come_since_is_read_once(tmp_path):
    path = tmp_path / "x"
    reader = JsonLinesReader(str(path))
    assert list(reader.read()) == []
    path.write_bytes(b'{"a": 1}\n{"a": 2}\n{"a"')
    assert list(reader.read()) == [{"a": 1}, {"a": 2}]
    with path.open("ab") as file:
        file.write(b': 3}\n{"b": 4}\n')
    assert list(reader.read()) == [{"a": 3}, {"b": 4}]
    assert list(reader.read()) == []
    path.write_bytes(b'{"c": 5}\n')
    assert list(reader.read()) == [{"c": 5}]


def test_last_lines(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b'{"a": 1}\n{"a": 2}\n{"a": 3}\n{"torn"')
    assert read_last_lines(str(path), 1000) == [{"a": 1}, {"a": 2}, {"a": 3}]
    assert read_last_lines(str(path), 20) == [{"a": 3}]
    assert read_last_lines(str(path), 5) == []
    assert read_last_lines(str(tmp_path / "none"), 5) == []


def test_listing_reads_here_and_there_of_a_large_file(tmp_path):
    """Its curve and last value are right, also after a restart; who asks for more, has all of it read."""
    run_dir = tmp_path / "a" / "run_001"
    run_dir.mkdir(parents=True)
    padding = "x" * 1000
    steps = [*((step, 0) for step in range(20_001)), *((step, 1) for step in range(10_000, 30_000))]
    with (run_dir / "metrics.jsonl").open("wb") as file:
        for step, attempt in steps:
            value = -5.0 if step == 777 else step / 1000 + attempt
            file.write(encode_line({**line(step, attempt, {"loss": value}), "padding": padding}))
    cache = IndexFile(tmp_path, tmp_path / "index")
    [rough] = summarize(find_runs(tmp_path, cache=cache), cache, is_rough=True)
    curve = rough.metrics["loss"]
    assert (rough.num_steps, curve.last, curve.least) == (29_999, 29.999 + 1, 0.0)
    assert 20 < len(curve.points) <= 48
    assert list(curve.points) == sorted(curve.points)
    [whole] = summarize(find_runs(tmp_path, cache=cache), cache)
    assert (whole.num_steps, whole.metrics["loss"].least) == (29_999, -5.0)


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
