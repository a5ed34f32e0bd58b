"""What workers print, on this process's own standard output: whole lines, with the rank in front.

A line may be drawn again and again before it is finished: after a carriage return, what follows replaces it, as with
progress bars. Whoever draws on the terminal shows it live. Where nobody does, in a pipe or a file, its state is printed
once in a while, so that logs stay readable. The worker's own log has all of it.
"""

import re
import time
from collections.abc import Callable, Iterable, Mapping

INTERVAL_S = 10.0
"""How often an unfinished line is printed that nobody shows."""

_MOST_CHARS = 1 << 16

_LINE_BELOW = re.compile(r"(?<!\n)\n++\r([^\n]*?)(?:\x1b\[A)+")
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

    def take(self, rank: int, text: str) -> None:
        *lines, rest = _LINE_BELOW.sub(r"\r\1", self._rest.pop(rank, "") + text).split("\n")
        if len(rest) > _MOST_CHARS:
            lines, rest = [*lines, rest], ""
        if lines:
            self._print(rank, map(_visible, lines))
        if rest:
            self._rest[rank] = rest[rest.rstrip("\r").rfind("\r") + 1 :]
        if not self.show(self._unfinished()) and _visible(rest) and self._is_due(rank):
            self._print(rank, [_visible(rest)])

    def flush(self) -> None:
        """Nothing follows for now: print what is unfinished as it is."""
        for rank, line in self._unfinished().items():
            self._print(rank, [line])
        self._rest.clear()
        self._printed_at.clear()

    def end(self) -> None:
        """Who has shown unfinished lines does so no more."""
        self.show({})
        self.show = _nobody
        self.flush()

    def _unfinished(self) -> dict[int, str]:
        return {rank: line for rank, rest in sorted(self._rest.items()) if (line := _visible(rest))}

    def _is_due(self, rank: int) -> bool:
        return self._clock() - self._printed_at.setdefault(rank, self._clock()) >= INTERVAL_S

    def _print(self, rank: int, lines: Iterable[str]) -> None:
        self._printed_at[rank] = self._clock()
        print("".join(f"[rank {rank}] {line}\n" for line in lines), end="", flush=True)


def _visible(line: str) -> str:
    """What a terminal would show of it, but for the end of a longer text that was there before."""
    return line.rstrip("\r").rpartition("\r")[2].rstrip()
