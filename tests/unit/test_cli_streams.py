"""Where what the command line prints goes: closed, full or broken streams, and encodings that lack characters."""

import codecs
import io
import os
import sys

import pytest
import typer

from paceline.cli import main, streams
from paceline.cli.announcing import Announcement
from paceline.cli.asking import answering, give, say


@pytest.fixture
def broken():
    """A pipe from which nobody reads any more."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stream:
        yield stream


def is_mute(stream):
    return os.fstat(stream.fileno()).st_rdev == os.stat(os.devnull).st_rdev


@pytest.mark.parametrize(
    ("text", "encoding", "written"),
    [
        ("größer …", "ascii", rb"gr\u00f6\u00dfer \u2026"),
        ("größer …", "latin-1", b"gr\xf6\xdfer \\u2026"),
        ("\U0001f600", "ascii", rb"\ud83d\ude00"),
        ("/results/\udcff", "utf-8", b"/results/\xff"),
        ("half \ud800", "utf-8", rb"half \ud800"),
    ],
)
def test_what_an_encoding_has_not_got_is_escaped(text, encoding, written):
    codecs.register_error("escaped for a test", streams.escaped)
    assert text.encode(encoding, "escaped for a test") == written


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"], ids=["as usual", "as where the locale is C"])
def test_streams_are_made_suitable(errors, monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors=errors))
    monkeypatch.setattr(sys, "stderr", None)
    streams.suit()
    with sys.stderr as nowhere:
        assert is_mute(nowhere)
        print("▁▂▃")
        sys.stdout.flush()
        assert sys.stdout.buffer.getvalue() == b"\\u2581\\u2582\\u2583\n"


def test_words_that_nobody_hears_stop_nothing(broken, monkeypatch):
    monkeypatch.setattr(sys, "stderr", broken)
    say("two\nlines")
    monkeypatch.undo()
    assert is_mute(broken)


def test_run_that_nobody_hears_of_begins(broken, monkeypatch):
    """A callback that raises would end it."""
    monkeypatch.setattr(sys, "stderr", broken)
    Announcement().start_training("/results/digits/run_001", {})
    monkeypatch.undo()
    assert is_mute(broken)


@pytest.mark.parametrize(("place", "code"), [("/dev/full", 2), ("nobody reads", 0)])
def test_answer_that_cannot_be_written(place, code, broken, monkeypatch, capsys):
    with open("/dev/full", "w") if place == "/dev/full" else broken as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with pytest.raises(typer.Exit) as caught:
            answering(give)(["a", "b"])
        monkeypatch.undo()
        assert caught.value.exit_code == code
        assert is_mute(stream), "or Python complains when it ends, with another exit code"
    assert ("No space left" in capsys.readouterr().err) == (code == 2)


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["xp", "rm", "--help"]], ids=" ".join)
def test_help_that_cannot_be_written(words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["paceline", *words])
    with open("/dev/full", "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with pytest.raises(SystemExit) as caught:
            main()
        monkeypatch.undo()
        assert is_mute(stream)
    assert caught.value.code == 2
    assert "No space left" in capsys.readouterr().err
