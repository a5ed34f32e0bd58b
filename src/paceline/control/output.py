"""What workers print, on this process's own standard output: whole lines, with the rank in front.

A line may be drawn again and again before it is finished: after a carriage return, what follows replaces it, as with
progress bars. Whoever draws on the terminal shows it live. Where nobody does, in a pipe or a file, its state is printed
once in a while, so that logs stay readable. The worker's own log has all of it.
"""

import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping

from paceline.control.usage import UsageOnce

INTERVAL_S = 10.0
"""How often an unfinished line is printed that nobody shows."""

_MOST_CHARS = 1 << 16

_BAR_BELOW = re.compile(r"(?<!\n)\n++\r([^\n]*?)(?:\x1b\[A)+")
"""A progress bar inside another one, drawn below it; then the cursor goes up again. It takes the place of the other."""


def _nobody(lines: Mapping[int, str]) -> bool:
    return False


class RankOutput:
    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.show: Callable[[Mapping[int, str]], bool] = _nobody
        """Gets the unfinished lines, by rank, and says whether somebody looks at them."""
        self._clock = clock
        self._rest: dict[int, str] = {}
        self._printed_at: dict[int, float] = {}
        self._usage = UsageOnce(clock)

    def take(self, rank: int, text: str) -> None:
        lines, self._rest[rank] = split_lines(self._rest.get(rank, "") + text)
        if lines and (lines := self._usage.new(rank, lines)):
            self._print(rank, lines)
        unfinished = self._unfinished()
        if not self.show(unfinished) and rank in unfinished and self._is_due(rank):
            self._print(rank, [unfinished[rank]])

    def flush(self) -> None:
        """Nothing follows for now: print what is unfinished as it is."""
        for rank, lines in self._usage.rest().items():
            self._print(rank, lines)
        for rank, rest in sorted(self._rest.items()):
            if lines := list(filter(None, map(_visible, rest.split("\n")))):
                self._print(rank, lines)
        self._rest.clear()
        self._printed_at.clear()

    def end(self) -> None:
        """Who has shown unfinished lines does so no more."""
        self.show({})
        self.show = _nobody
        self.flush()

    def _unfinished(self) -> dict[int, str]:
        latest = ((rank, rest.rstrip("\n").rpartition("\n")[2]) for rank, rest in sorted(self._rest.items()))
        return {rank: line for rank, state in latest if (line := _visible(state))}

    def _is_due(self, rank: int) -> bool:
        return self._clock() - self._printed_at.setdefault(rank, self._clock()) >= INTERVAL_S

    def _print(self, rank: int, lines: Iterable[str]) -> None:
        self._printed_at[rank] = self._clock()
        text = f"[rank {rank}] " + f"\n[rank {rank}] ".join(lines)
        try:
            try:
                print(text, flush=True)
            except UnicodeEncodeError:  # a terminal, or a file, that has not got every character
                print(_encodable(text), flush=True)
        except OSError:  # as of `… | head`, or a full disk. The run goes on, and its logs have every line
            _discard_output()


def _encodable(text: str) -> str:
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _discard_output() -> None:
    """What is still in the stream's buffer would be tried again at every print, and when Python ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, sys.stdout.fileno())
    finally:
        os.close(nowhere)


def split_lines(text: str) -> tuple[list[str], str]:
    """The finished lines, as they look in the end, and what may still change: the last line, and a bar above it if the
    last line may turn out to be a bar that is drawn below that."""
    if "\r" not in text and len(text) - text.rfind("\n") <= _MOST_CHARS:  # nearly always
        *lines, rest = text.split("\n")
        return lines, rest
    *lines, rest = _BAR_BELOW.sub(r"\r\1", text.replace("\r\n", "\n")).split("\n")
    num_final = len(lines)
    if not rest or rest.rfind("\r") == 0:  # a second carriage return without a way up: it is not below another one
        while num_final and not lines[num_final - 1]:
            num_final -= 1
        num_final = num_final - 1 if num_final and "\r" in lines[num_final - 1] else len(lines)
    rest = "\n".join([*lines[num_final:], rest[max(0, rest.rstrip("\r").rfind("\r")) :]])
    final = lines[:num_final]
    if len(rest) > _MOST_CHARS:
        final, rest = [*final, *rest.split("\n")], ""
    return [_visible(line) for line in final], rest


def _visible(line: str) -> str:
    """What a terminal would show of it, but for the end of a longer text that was there before."""
    return line.rstrip("\r").rpartition("\r")[2].replace("\x1b[A", "").rstrip()
