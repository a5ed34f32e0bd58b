"""Which saves of which ranks make a checkpoint: a cut through all ranks of an attempt. Pure.

The n-th save of every rank that saves is its part of the n-th checkpoint. It counts when all of them are there, and so,
as parts travel behind the reports made before them, all reports up to it. A rank need not save: it is known not to when
it has ended without, or has reported further than rank 0 had when it saved for the first time. Until one or the other
shows, the checkpoints of rank 0 wait for it; but not for ever for one that is never heard of, since a script that
reports and saves on rank 0 alone would otherwise have no checkpoint until its end.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.checkpoints.part import Part

SILENCE_S = 60.0
"""For how long rank 0 has to have saved before a rank that neither reported nor saved meanwhile counts as one that does
not save."""

SILENCE_OF_ALL_S = 2.0
"""The same where rank 0 does not report either, and so nothing can be learned from reports."""

MOST_WAITING = 8
"""Checkpoints of rank 0 that may wait for slower ranks. Each is a copy of the shared state on storage."""


@dataclass(frozen=True)
class SaveMismatch:
    """Ranks that ended with different numbers of saves. `counts` are the saves so far, by rank."""

    counts: tuple[int, ...]
    ended: tuple[int, ...]

    def __str__(self) -> str:
        saves = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(self.counts))
        ended = ", ".join(map(str, self.ended))
        return (
            f"The ranks do not save equally often ({saves}; ended: {ended}). The n-th save_checkpoint() of all ranks "
            "makes one checkpoint: call it the same number of times on all of them, or on rank 0 alone."
        )


@dataclass(frozen=True)
class Cut:
    """The parts that make one checkpoint, by rank, that of rank 0 among them."""

    id: int
    parts: tuple[Part, ...]


class Ledger:
    """The saves of one attempt. `former_savers` have saved in an attempt before it."""

    def __init__(self, world_size: int, first_id: int, first_iteration: int = 0, former_savers: Iterable[int] = ()):
        self.world_size, self._first_id, self._first_iteration = world_size, first_id, first_iteration
        self._parts: dict[int, dict[int, Part]] = {}
        self._writing: dict[int, set[int]] = {}
        self._counts = [0] * world_size
        self._most = 0
        self._fewest: int | None = None
        """Saves of a rank that has ended, of those that save; rank 0 has to."""
        self._ended: set[int] = set()
        self._savers, self._former_savers = {0}, frozenset(former_savers)
        self._unknown = set(range(1, world_size))
        self._last_done = first_id - 1
        self.failed: set[int] = set()
        """Checkpoints of which rank 0 could not write its part."""
        self._failed_parts: set[tuple[int, int]] = set()
        self._owners: set[int] = set()
        """Ranks that have given something of their own, or meant to."""
        self._first_save: Part | None = None
        self._last_save: Part | None = None
        """Of rank 0."""
        self._given_up: set[int] = set()
        self._to_drop: list[int] = []
        self._silent: list[int] = []

    @property
    def savers(self) -> frozenset[int]:
        """The ranks that have saved, and rank 0."""
        return frozenset(self._savers)

    @property
    def waits_for_word(self) -> bool:
        """Whether a report, too, can complete a checkpoint now."""
        return bool(self._unknown and self._parts)

    def begin(self, rank: int, id: int) -> None:
        """The rank has begun to write its part: it is rank 0, or has something of its own. It may have been faster than
        this message, or have failed already."""
        self._count(rank, id)
        if rank:
            self._owners.add(rank)
        is_told = rank in self._parts.get(id, {}) or (rank, id) in self._failed_parts
        if id > self._last_done and not is_told and id not in self._given_up:
            self._writing.setdefault(id, set()).add(rank)

    def add(self, part: Part) -> None:
        """The part is durable. One that comes too late, from a rank that seemed not to save, is left out."""
        self._count(part.rank, part.id)
        self._writing.get(part.id, set()).discard(part.rank)
        if part.has_own:
            self._owners.add(part.rank)
        if part.rank == 0:
            self._first_save, self._last_save = self._first_save or part, part
        if part.id > self._last_done and part.id not in self._given_up:
            self._parts.setdefault(part.id, {})[part.rank] = part
            self._give_up_excess()

    def fail(self, rank: int, id: int) -> None:
        """The part could not be written: this checkpoint will not be."""
        self._count(rank, id)
        self._writing.get(id, set()).discard(rank)
        self._failed_parts.add((rank, id))
        if rank == 0:
            self.failed.add(id)
        else:
            self._owners.add(rank)

    def end(self, rank: int) -> None:
        self._ended.add(rank)
        count = self._counts[rank]
        if count or rank == 0:
            self._fewest = count if self._fewest is None else min(self._fewest, count)

    def _count(self, rank: int, id: int) -> None:
        self._counts[rank] = max(self._counts[rank], id - self._first_id + 1)
        self._most = max(self._most, self._counts[rank])
        self._savers.add(rank)
        self._unknown.discard(rank)

    def take_complete(self, num_reports: Sequence[int]) -> list[Cut]:
        """Those that count from now on, oldest first; `num_reports` are the reports of this attempt, by rank."""
        while self._unknown:
            # one is enough to wait for; to ask all of them each time would make many ranks slow
            rank = next(iter(self._unknown))
            if not self._abstains(rank, num_reports):
                return []
            self._unknown.discard(rank)
            if self._is_unheard_of(rank, num_reports) and not self._nobody_reports(rank, num_reports):
                self._silent.append(rank)
        return self._take(id for id, parts in self._parts.items() if self._savers <= parts.keys())

    def take_salvage(self, num_reports: Sequence[int]) -> list[Cut]:
        """At the end of the attempt, when nothing more will come: those that are complete without the parts that are
        missing. A part is not missed if its rank had reported all steps up to the checkpoint, and no rank has anything
        of its own in it, nor would this one have had: then the shared state, which is rank 0's, is all there is.

        Who has neither saved nor reported is taken for one that does not save, if rank 0 does not report either.
        """
        self._unknown -= {rank for rank in self._unknown if self._abstains(rank, num_reports)}

        def can_do_without(rank: int, parts: dict[int, Part]) -> bool:
            if rank in parts:
                return True
            if self._is_unheard_of(rank, num_reports) and self._nobody_reports(rank, num_reports):
                return rank in self._unknown
            if rank not in self._savers and rank not in self._unknown:
                return True
            has_come_so_far = self._first_iteration + num_reports[rank] >= parts[0].iteration
            return has_come_so_far and rank not in self._owners and not any(part.has_own for part in parts.values())

        return self._take(
            id
            for id, parts in self._parts.items()
            if 0 in parts and all(can_do_without(rank, parts) for rank in range(self.world_size))
        )

    def _give_up_excess(self) -> None:
        """Where a rank is far behind, not every checkpoint of rank 0 can wait for it: the oldest ones, which it reaches
        first, and the newest do."""
        waiting = sorted(id for id, parts in self._parts.items() if 0 in parts)
        if len(waiting) > MOST_WAITING:
            self._given_up.add(waiting[-2])
            self._drop(waiting[-2])

    def _drop(self, id: int) -> None:
        self._parts.pop(id, None)
        self._writing.pop(id, None)
        self._to_drop.append(id)

    def take_lost(self) -> list[int]:
        """The ids of checkpoints that were begun and will never be: a later one is complete, or too many waited."""
        for id in {*self._parts, *self._writing}:
            if id <= self._last_done:
                self._drop(id)
        lost, self._to_drop = sorted(self._to_drop), []
        return lost

    def take_silent(self) -> list[int]:
        """Ranks that, since the last time, have come to be taken for such as do not save because they are silent."""
        silent, self._silent = self._silent, []
        return silent

    def is_hopeful(self, gone: Iterable[int] = ()) -> bool:
        """Whether a checkpoint is on its way that could still become complete without the ranks that are gone."""
        gone = set(gone)
        return any(
            all(rank in self._parts.get(id, {}) or (rank in writing and rank not in gone) for rank in self._savers)
            for id, writing in self._writing.items()
            if writing
        )

    def find(self, id: int) -> tuple[int, dict[int, Part]] | None:
        """The parts that make up this checkpoint so far, or the next one that was not given up, once rank 0's is among
        them."""
        wanted = min((one for one, parts in self._parts.items() if one >= id and 0 in parts), default=None)
        if wanted is None or (wanted != id and id not in self._given_up):
            return None
        return wanted, self._parts[wanted]

    def mismatch(self) -> SaveMismatch | None:
        """Known as soon as one rank that saves has ended and another has saved more often. Asked after every event."""
        if self._fewest is None or self._fewest == self._most:
            return None
        return SaveMismatch(tuple(self._counts), tuple(sorted(self._ended)))

    def _abstains(self, rank: int, num_reports: Sequence[int]) -> bool:
        if rank in self._ended:
            return True
        first, last = self._first_save, self._last_save
        if first is None or last is None:
            return False
        if self._first_iteration + num_reports[rank] > first.iteration:
            return True
        patience_s = SILENCE_OF_ALL_S if self._nobody_reports(rank, num_reports) else SILENCE_S
        return self._is_unheard_of(rank, num_reports) and last.time - first.time >= patience_s

    def _is_unheard_of(self, rank: int, num_reports: Sequence[int]) -> bool:
        return not num_reports[rank] and rank not in self._ended and rank not in self._former_savers

    def _nobody_reports(self, rank: int, num_reports: Sequence[int]) -> bool:
        last = self._last_save
        return last is not None and last.iteration == self._first_iteration and not num_reports[rank]

    def _take(self, ids: Iterable[int]) -> list[Cut]:
        cuts = [Cut(id, tuple(self._parts[id][rank] for rank in sorted(self._parts[id]))) for id in sorted(ids)]
        for cut in cuts:
            del self._parts[cut.id]
            self._writing.pop(cut.id, None)
            self._last_done = max(self._last_done, cut.id)
        return cuts
