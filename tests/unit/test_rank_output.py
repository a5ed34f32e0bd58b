"""What workers print: whole lines for logs, unfinished ones for whoever shows them."""

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


@pytest.mark.parametrize(
    ("texts", "lines"),
    [
        (["a\nb\n"], ["a", "b"]),
        (["a", "b\nc\n"], ["ab", "c"]),
        (["\n\n"], ["", ""]),
        (["windows\r\n"], ["windows"]),
        (["\r 10%", "\r 20%", "\r100%\n", "done\n"], ["100%", "done"]),  # as tqdm does
        (["10%\r", "20%\r", "100%\n"], ["100%"]),  # as wget and others do
        (["\r 10%", "\r    \rdone\n"], ["done"]),
        (["\router 1", "\n\r inner 1\x1b[A", "\n\r inner 2\x1b[A", "\n\r    \r\x1b[A", "\router 2\n"], ["outer 2"]),
        (["\router", "\n\n\r third\x1b[A\x1b[A", "\r\n"], [" third"]),
        (["form\x0cfeed\u2028\n"], ["form\x0cfeed"]),
    ],
)
def test_lines_are_printed_when_they_are_finished(output, capsys, texts, lines):
    for text in texts:
        output.take(3, text)
    assert capsys.readouterr().out == "".join(f"[rank 3] {line}\n" for line in lines)


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
    assert states[-1] == {0: "5%"}
    assert capsys.readouterr().out == "[rank 1] 100%\n"
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
