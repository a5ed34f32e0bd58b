"""Pair the k-th report of every rank into one step. Pure.

A rank other than 0 need not report at all: once it is excused, steps are complete without it. Should it report after
all, what it says of steps that are complete comes late; from then on it is waited for again.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any

Report = dict[str, Any]

Step = list[Report | None]
"""In rank order; None for a rank that was not waited for."""


@dataclass(frozen=True)
class Mismatch:
    """Ranks that ended with different numbers of reports. `counts` are the reports so far, by rank."""

    counts: tuple[int, ...]
    ended: tuple[int, ...]

    def __str__(self) -> str:
        ended = {rank: self.counts[rank] for rank in self.ended if self.counts[rank] or rank == 0}
        short = min(ended.values())
        who = ", ".join(f"rank {rank} ended after {count}" for rank, count in ended.items() if count == short)
        ahead = ", ".join(f"rank {rank} has made {count}" for rank, count in enumerate(self.counts) if count > short)
        return (
            f"The ranks do not report equally often: {who} report(s), while {ahead}. Call report() the same number of "
            "times on all ranks, or on rank 0 alone."
        )


class Gather:
    """Reports of one attempt on their way to becoming steps."""

    def __init__(self, world_size: int):
        self._queues: list[deque[Report]] = [deque() for _ in range(world_size)]
        self._counts = [0] * world_size
        self._most = 0
        self._ended: set[int] = set()
        self._fewest: int | None = None
        """Reports of a rank that has ended, of those that report; rank 0 has to."""
        self._missing = world_size
        self._num_steps = 0
        self._excused: set[int] = set()

    @property
    def world_size(self) -> int:
        return len(self._queues)

    @property
    def counts(self) -> list[int]:
        """How many reports each rank has made."""
        return self._counts

    @property
    def mute(self) -> list[int]:
        """The ranks for whose first report those of rank 0 wait."""
        if not self._queues[0]:
            return []
        return [rank for rank, count in enumerate(self._counts) if not count and rank not in self._excused]

    def add(self, rank: int, report: Report) -> Step | None:
        """Take a report; returns the step that it completes, or, if it is late, its part of one: then that of rank 0 is
        not there."""
        self._counts[rank] += 1
        if self._counts[rank] > self._most:
            self._most = self._counts[rank]
        if self._excused and rank in self._excused and self._is_late(rank):
            return [report if rank == other else None for other in range(self.world_size)]
        queue = self._queues[rank]
        if not queue:
            self._missing -= 1
        queue.append(report)
        return self._take_step()

    def _is_late(self, rank: int) -> bool:
        if self._counts[rank] <= self._num_steps:
            return True
        self._excused.discard(rank)
        self._missing += 1
        return False

    def _take_step(self) -> Step | None:
        if self._missing:
            return None
        self._num_steps += 1
        if self._excused:
            step: Step = [queue.popleft() if queue else None for queue in self._queues]
        else:
            step = [queue.popleft() for queue in self._queues]
        self._missing = sum(not queue for queue in self._queues) - len(self._excused)
        return step

    def excuse(self, ranks: list[int]) -> list[Step]:
        """These do not report; returns the steps that are complete without them."""
        self._excused.update(ranks)
        self._missing -= len(ranks)
        return list(iter(self._take_step, None))

    def leftovers(self) -> list[Step]:
        """The steps that are not complete, in order: the reports that there are."""
        longest = max(len(queue) for queue in self._queues)
        return [[queue[index] if index < len(queue) else None for queue in self._queues] for index in range(longest)]

    def end(self, rank: int) -> list[Step]:
        """The rank will make no more reports; returns the steps that are complete if it has never made one."""
        self._ended.add(rank)
        count = self._counts[rank]
        if rank and not count:
            return self.excuse([rank]) if rank not in self._excused else []
        self._fewest = count if self._fewest is None else min(self._fewest, count)
        return []

    def mismatch(self) -> Mismatch | None:
        """Known as soon as one rank that reports has ended and another has reported more often. Asked after every
        event."""
        if self._fewest is None or self._fewest == self._most:
            return None
        return Mismatch(tuple(self._counts), tuple(sorted(self._ended)))
