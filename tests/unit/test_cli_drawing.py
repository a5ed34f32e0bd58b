"""Text for a terminal, as functions."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cli.curves import draw
from paceline.cli.drawing import (
    Column,
    cells,
    clean,
    clean_json,
    clean_lines,
    cut,
    left_out,
    number,
    paint,
    size_of,
    span,
    spark,
    table,
)


@given(st.text())
def test_clean_text_does_nothing_to_a_terminal(text):
    shown = clean(text)
    assert shown.isascii() or shown.encode()
    assert not any(ord(c) < 32 or 127 <= ord(c) < 160 or 0xD800 <= ord(c) < 0xE000 for c in shown)


def test_clean_shows_what_was_there():
    assert clean("a\x1b[2Jb\nc\x9bd\u202ee\udcff") == r"a\x1b[2Jb\x0ac\x9bd\u202ee\xff"
    assert clean("Größe 数\tα") == "Größe 数 α"


def test_lines_of_a_log():
    assert clean_lines("\x1b[31mred\x1b[0m\r\n10%\r50%\r100%\nend\r") == ["red", "100%", "end"]
    assert clean_lines("\x1b]0;title\x07") == [r"\x1b]0;title\x07"]


@given(st.dictionaries(st.text(), st.text()))
def test_clean_json_is_the_same_value(value):
    text = clean_json(json.dumps(value, ensure_ascii=False))
    assert json.loads(text) == value
    assert not any(127 <= ord(c) < 160 for c in text)


@given(st.text(), st.integers(0, 40))
def test_cut_fits(text, most):
    assert cells(cut(text, most)) <= most


def test_cut_keeps_both_ends():
    assert cut("sweep/learning_rate_0.1", 11) == "sweep…e_0.1"
    assert cut("数数数数", 5) == "数…数"


COLUMNS = (Column("name"), Column("state"), Column("metric", rank=1), Column("curve", rank=3), Column("tags", rank=5))
ROW = ("a_rather_long_name_of_an_experiment", "SUCCEEDED", "validation_loss 0.125", "▁▂▃▄▅▆▇█", "best paper")


@pytest.mark.parametrize("most", [200, 80, 60, 40, 20])
def test_table_fits(most):
    lines = table(COLUMNS, [ROW], most)
    assert max(map(cells, lines)) <= most
    shown = lines[0].split()
    assert shown[:2] == ["name", "state"] or most == 20


def test_table_in_a_pipe_has_everything():
    assert table(COLUMNS, [ROW], None)[1] == "  ".join(ROW)


def test_what_says_little_goes_first():
    assert table(COLUMNS, [ROW], 76)[0].split() == ["name", "state", "metric", "curve"]
    assert table(COLUMNS, [ROW], 52)[0].split() == ["name", "state", "metric"]
    assert left_out(COLUMNS, [ROW], 52) == ["curve", "tags"]
    assert left_out(COLUMNS, [ROW], None) == []


def test_empty_columns_are_left_out():
    assert table(COLUMNS, [("a", "FAILED", "", "", "x")], None)[0].split() == ["name", "state", "tags"]


def test_colours_do_not_change_the_widths():
    plain = table(COLUMNS, [ROW], 80)
    painted = table(COLUMNS, [ROW], 80, {1: {"SUCCEEDED": "green"}}, is_on=True)
    assert paint("SUCCEEDED", "green", True) in painted[1]
    assert [line.replace("\x1b[32m", "").replace("\x1b[1m", "").replace("\x1b[0m", "") for line in painted] == plain


def test_spark():
    assert spark([]) == ""
    assert spark([3.0]) == spark([float("nan"), 3.0]) == "▁"
    assert spark([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert len(spark(range(1000))) == 8
    assert spark([-1.7e308, 1.7e308, 5e-324]) == "▁█▅"


def test_numbers():
    assert [number(value) for value in (3.0, 0.123456, 1e-9, 1e12, float("nan"), None)] == [
        "3", "0.1235", "1e-09", "1e+12", "nan", "",
    ]  # fmt: skip
    assert [span(value) for value in (0.25, 59, 61, 3600, 5000, 100_000, 10**8, None)] == [
        "0.2s", "59s", "1m1s", "1h", "1h23m", "1d3h", "1157d", "",
    ]  # fmt: skip
    assert [span(value, is_rough=True) for value in (0.25, 61, 5000, 100_000)] == ["0s", "1m", "1h", "1d"]
    assert [size_of(value) for value in (0, 999, 1500, 123_456_789, 10**16)] == [
        "0 B", "999 B", "1.5 KB", "123 MB", "10000 TB",
    ]  # fmt: skip


def test_curves_stay_in_their_box():
    lines = draw({"loss": [(step, (step % 7) / 3) for step in range(50)]}, (40, 5))
    assert len(lines) == 1 + 5 + 1
    assert max(map(cells, lines)) <= 40
    assert lines[1].startswith("2 ┤")


@pytest.mark.parametrize(
    "points", [[], [(1, float("nan"))], [(1, 2.0)], [(1, 2.0), (2, 2.0)], [(0, 1e300), (1, -1e308), (2, 1.7e308)]]
)
def test_curves_of_few_points(points):
    assert max(map(cells, draw({"x": points}, (40, 5))), default=0) <= 40


def test_curves_are_told_apart():
    both = {"a": [(0, 0.0), (1, 1.0)], "b": [(0, 1.0), (1, 0.0)]}
    assert len(draw(both, (40, 5))) == 2 * (1 + 5 + 1)
    assert len(draw(both, (40, 5), is_coloured=True)) == 2 + 5 + 1
