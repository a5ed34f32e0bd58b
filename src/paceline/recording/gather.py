"""Pair the k-th report of every rank into one step. Pure."""

from collections import deque
from dataclasses import dataclass
from typing import Any

Report = dict[str, Any]


@dataclass(frozen=True)
class Mismatch:
    """Ranks that ended with different numbers of reports. `counts` are the reports so far, by rank."""

    counts: tuple[int, ...]
    ended: tuple[int, ...]

    def __str__(self) -> str:
        ended = {rank: self.counts[rank] for rank in self.ended}
        short = min(ended.values())
        who = ", ".join(f"rank {rank} ended after {count}" for rank, count in ended.items() if count == short)
        ahead = ", ".join(f"rank {rank} has made {count}" for rank, count in enumerate(self.counts) if count > short)
        return (
            f"The ranks do not report equally often: {who} report(s), while {ahead}. Every rank has to call "
            "report() the same number of times: report on all of them, not only on rank 0."
        )


class Gather:
    """Reports of one attempt on their way to becoming steps."""

    def __init__(self, world_size: int):
        self._queues: list[deque[Report]] = [deque() for _ in range(world_size)]
        self._counts = [0] * world_size
        self._most = 0
        self._ended: set[int] = set()
        self._fewest: int | None = None
        """Reports of a rank that has ended."""
        self._missing = world_size

    @property
    def world_size(self) -> int:
        return len(self._queues)

    @property
    def counts(self) -> list[int]:
        """How many reports each rank has made."""
        return self._counts

    def add(self, rank: int, report: Report) -> list[Report] | None:
        """Take a report; returns the step that it completes, in rank order."""
        queue = self._queues[rank]
        if not queue:
            self._missing -= 1
        queue.append(report)
        self._counts[rank] += 1
        if self._counts[rank] > self._most:
            self._most = self._counts[rank]
        if self._missing:
            return None
        step = [queue.popleft() for queue in self._queues]
        self._missing = sum(not queue for queue in self._queues)
        return step

    def leftovers(self) -> list[dict[int, Report]]:
        """The steps that are not complete, in order: the reports that there are, by rank."""
        longest = max(len(queue) for queue in self._queues)
        return [
            {rank: queue[index] for rank, queue in enumerate(self._queues) if index < len(queue)}
            for index in range(longest)
        ]

    def end(self, rank: int) -> None:
        self._ended.add(rank)
        count = self._counts[rank]
        self._fewest = count if self._fewest is None else min(self._fewest, count)

    def mismatch(self) -> Mismatch | None:
        """Known as soon as one rank has ended and another has reported more often. Asked after every event."""
        if self._fewest is None or self._fewest == self._most:
            return None
        return Mismatch(tuple(self._counts), tuple(sorted(self._ended)))
