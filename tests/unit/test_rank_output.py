"""What workers print: whole lines for logs, unfinished ones for whoever shows them."""

import io
import os
import sys

import pytest

from paceline.callbacks import ProgressCallback
from paceline.callbacks.dispatch import CallbackList
from paceline.control.output import INTERVAL_S, RankOutput


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def output(clock):
    return RankOutput(clock)


def live(output):
    """The states that somebody has been shown."""
    states = []

    def show(lines):
        states.append(dict(lines))
        return True

    output.show = show
    return states


NESTED = "\router 1\n\r inner 1\x1b[A\n\r inner 2\x1b[A\n\r        \x1b[A\router 2\n"  # as tqdm draws them


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("a\nb\n", ["a", "b"]),
        ("no newline", ["no newline"]),
        ("\n\na\n", ["", "", "a"]),
        ("windows\r\nunix\n", ["windows", "unix"]),
        ("\r 10%\r 20%\r100%\ndone\n", ["100%", "done"]),
        ("10%\r20%\r100%\ndone\n", ["100%", "done"]),
        ("\r 10%\r    \rdone\n", ["done"]),
        ("\rfirst 50%\rfirst 100%\n\rsecond 0%\rsecond 100%\n", ["first 100%", "second 100%"]),
        (NESTED, ["outer 2"]),
        (NESTED + "then\n", ["outer 2", "then"]),
        ("\router 0%\n\r in 0%\x1b[A\r in 100%\n\router 50%\router 100%\n", [" in 100%", "outer 100%"]),
        ("\router\n\n\r third\x1b[A\x1b[A\r\n", [" third"]),
        ("form\x0cfeed\u2028on\n", ["form\x0cfeed\u2028on"]),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3, 1000], ids="in pieces of {}".format)
def test_lines_are_printed_as_they_look_in_the_end(output, capsys, text, lines, size):
    for at in range(0, len(text), size):
        output.take(3, text[at : at + size])
    output.flush()
    assert capsys.readouterr().out == "".join(f"[rank 3] {line}\n" for line in lines)


def test_line_is_printed_as_soon_as_it_is_finished(output, capsys):
    output.take(0, "a\nb")
    assert capsys.readouterr().out == "[rank 0] a\n"
    output.take(0, "\n")
    assert capsys.readouterr().out == "[rank 0] b\n"


def test_ranks_do_not_mix(output, capsys):
    output.take(0, "from ")
    output.take(1, "from one\n")
    output.take(0, "zero\n")
    assert capsys.readouterr().out == "[rank 1] from one\n[rank 0] from zero\n"


def test_unfinished_line_is_shown_live_and_not_printed(output, capsys, clock):
    states = live(output)
    for percent in (10, 20, 30):
        clock.now += INTERVAL_S
        output.take(1, f"\r{percent}%")
    output.take(0, "\r5%")
    assert states == [{1: "10%"}, {1: "20%"}, {1: "30%"}, {0: "5%", 1: "30%"}]
    assert capsys.readouterr().out == ""
    output.take(1, "\r100%\n")
    assert states[-1] == {0: "5%", 1: "100%"}, "the newline may be the way to a bar below"
    output.take(1, "done\n")
    assert states[-1] == {0: "5%"}
    assert capsys.readouterr().out == "[rank 1] 100%\n[rank 1] done\n"
    output.end()
    assert states[-1] == {}
    assert capsys.readouterr().out == "[rank 0] 5%\n"


def test_where_nobody_looks_it_is_printed_once_in_a_while(output, capsys, clock):
    for second in range(int(3 * INTERVAL_S)):
        clock.now = second
        output.take(0, f"\r{second}")
    printed = capsys.readouterr().out.splitlines()
    assert printed == [f"[rank 0] {INTERVAL_S:g}", f"[rank 0] {2 * INTERVAL_S:g}"]


def test_what_is_unfinished_at_the_end_is_printed(output, capsys):
    output.take(0, "no newline")
    output.flush()
    output.take(0, "next\n")
    assert capsys.readouterr().out == "[rank 0] no newline\n[rank 0] next\n"


def test_endless_line_does_not_gather(output, capsys):
    for _ in range(10):
        output.take(0, "x" * 100_000)
    assert capsys.readouterr().out == ("[rank 0] " + "x" * 100_000 + "\n") * 10


def test_only_a_display_shows_unfinished_lines():
    assert not CallbackList([]).show_unfinished({0: "10%"})
    assert CallbackList([ProgressCallback()]).show_unfinished({0: "10%"})


def test_run_goes_on_when_nobody_reads_what_is_printed(output, monkeypatch):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        output.take(0, "to nobody\n")
        output.take(1, "once more\n")
        output.end()
        monkeypatch.undo()
        assert os.fstat(stream.fileno()).st_rdev == os.stat(os.devnull).st_rdev


def test_run_goes_on_where_nothing_more_can_be_written(output, monkeypatch):
    """As of `train run > FILE` on a full disk."""
    with open("/dev/full", "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        output.take(0, "to a full disk\n")
        output.take(1, "once more\n")
        monkeypatch.undo()
        assert os.fstat(stream.fileno()).st_rdev == os.stat(os.devnull).st_rdev


def test_character_that_standard_output_has_not_got(output, monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    output.take(0, "größer …\nplain\n")
    monkeypatch.undo()
    assert stream.buffer.getvalue() == b"[rank 0] gr\\xf6\\xdfer \\u2026\n[rank 0] plain\n"


# --- how a script is called -----------------------------------------------------------------------------------------

USAGE = "usage: train.py [-h] [--lr LR]\ntrain.py: error: unrecognized arguments: --bogus\n"


def shown(capsys):
    return capsys.readouterr().out.splitlines()


def test_usage_is_shown_once_for_all_ranks(output, capsys):
    output.take(1, "a warning\n" + USAGE[:40])
    output.take(0, "a warning\n" + USAGE)
    output.take(2, USAGE)
    output.take(1, USAGE[40:])
    output.flush()
    lines = shown(capsys)
    assert [line for line in lines if "warning" in line] == ["[rank 1] a warning", "[rank 0] a warning"]
    assert [line.partition("] ")[2] for line in lines if "warning" not in line] == USAGE.splitlines()


def test_usage_that_differs_is_shown(output, capsys):
    other = USAGE.replace("--bogus", "--other")
    output.take(0, USAGE)
    output.take(1, other)
    output.flush()
    told = [f"[rank 0] {line}" for line in USAGE.splitlines()]
    assert shown(capsys) == told + [f"[rank 1] {line}" for line in other.splitlines()]


def test_what_comes_after_a_usage_is_shown(output, clock, capsys):
    for rank in (0, 1):
        output.take(rank, "usage: 30 %\n")
    output.take(1, "first step\n")
    output.flush()
    assert shown(capsys) == ["[rank 0] usage: 30 %", "[rank 1] first step"]
    for rank in (0, 1):
        output.take(rank, "usage: 30 %\n")
    clock.now += INTERVAL_S
    output.take(1, "later\n")
    assert shown(capsys) == ["[rank 0] usage: 30 %", "[rank 1] usage: 30 %", "[rank 1] later"]


def test_next_attempt_shows_its_usage(output, capsys):
    for rank in (0, 1):
        output.take(rank, USAGE)
    output.flush()
    output.take(1, USAGE)
    output.flush()
    assert len(shown(capsys)) == 4
