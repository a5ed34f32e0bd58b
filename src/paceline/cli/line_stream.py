"""Text that comes in pieces, printed by whole lines and cleaned of what a terminal would act on."""

from collections.abc import Callable
from typing import TextIO

_BEGINNING_CHARS = 1 << 20


class LineStream:
    def __init__(
        self,
        file: TextIO,
        is_wanted: Callable[[str], bool] = lambda line: True,
        shown: Callable[[str], str] = lambda line: line,
        num_skipped: int = 0,
        raw: bool = False,
    ):
        """`num_skipped` characters have been seen already."""
        self.beginning = ""
        """The first of what has come."""
        self._file, self._is_wanted, self._shown = file, is_wanted, shown
        self._num_skipped, self._raw, self._rest = num_skipped, raw, ""

    def feed(self, text: str) -> None:
        if len(self.beginning) < _BEGINNING_CHARS:
            self.beginning += text
        text, self._num_skipped = text[self._num_skipped :], max(0, self._num_skipped - len(text))
        whole, newline, self._rest = (self._rest + text).rpartition("\n")
        if newline:
            self._print(whole)

    def close(self) -> None:
        """What comes after the last line's end is a line too."""
        if self._rest:
            self._print(self._rest)
            self._rest = ""

    def _print(self, text: str) -> None:
        from paceline.cli.drawing import clean_lines

        for line in text.split("\n") if self._raw else clean_lines(text):
            if self._is_wanted(line):
                print(self._shown(line), file=self._file)
        self._file.flush()
