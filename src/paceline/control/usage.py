"""How a script is called: argparse prints that on every rank, if words are wrong or ask for help. Once is enough."""

from collections.abc import Callable

_MOST_LINES, _MOST_S = 500, 10.0


class UsageOnce:
    """Lets through what the first rank prints from "usage: " on, and of the others only what differs. Whoever goes on
    for long has not ended with it, and is let through as well."""

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._teller: int | None = None
        self._told: list[str] = []
        self._held: dict[int, list[str]] = {}
        self._since = 0.0

    def new(self, rank: int, lines: list[str]) -> list[str]:
        """What is to be shown of further lines of a rank."""
        if rank == self._teller:
            self._told += lines[: _MOST_LINES - len(self._told)]
        if rank in self._held:
            return self._of(rank, self._held.pop(rank) + lines)
        begin = next((place for place, line in enumerate(lines) if line.startswith("usage: ")), None)
        if begin is None or rank == self._teller:
            return lines
        if self._teller is None:
            self._teller, self._told, self._since = rank, lines[begin:], self._clock()
            return lines
        return lines[:begin] + self._of(rank, lines[begin:])

    def _of(self, rank: int, lines: list[str]) -> list[str]:
        is_same = all(ours == told for ours, told in zip(lines, self._told, strict=False))
        if is_same and len(lines) < _MOST_LINES and self._clock() - self._since < _MOST_S:
            self._held[rank] = lines
            return []
        return lines

    def rest(self) -> dict[int, list[str]]:
        """Nothing follows for now: what was held back of each rank and has not been told by the first one."""
        left = {rank: lines[len(self._told) :] for rank, lines in sorted(self._held.items())}
        self._teller = None
        self._held.clear()
        return {rank: lines for rank, lines in left.items() if lines}
