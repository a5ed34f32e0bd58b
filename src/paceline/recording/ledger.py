"""Which saves of which ranks make a checkpoint: a cut through all ranks of an attempt. Pure.

The n-th save of every rank that saves is its part of the n-th checkpoint. It counts when all of them are there, and all
ranks have reported every step up to it. A rank need not save: it is known not to when it has ended without, has
reported two steps more than rank 0 had when it saved for the first time, or has been with rank 0 in collectives after
that. Until one of these shows, the checkpoints of rank 0 wait for it; but for a rank that neither saves nor reports,
and so may have no way to show it, not for ever.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.checkpoints.part import Part

SILENCE_S = 60.0
"""How long after rank 0 has first saved a rank that has neither saved nor reported counts as one that does neither."""

PROOF_S = 1.0
"""How old a proof by collectives must be: what a rank had sent before them has then been heard."""

MOST_WAITING = 8
"""Checkpoints that may wait for slower ranks. Each may be a copy of the shared state on storage."""


@dataclass(frozen=True)
class SaveMismatch:
    """Ranks that ended with different numbers of saves. `counts` are the saves so far, by rank."""

    counts: tuple[int, ...]
    ended: tuple[int, ...]

    def __str__(self) -> str:
        saving = [rank for rank in self.ended if self.counts[rank] or rank == 0]
        short = min(self.counts[rank] for rank in saving)
        who = ", ".join(f"rank {rank} ended after {short}" for rank in saving if self.counts[rank] == short)
        ahead = ", ".join(f"rank {rank} has made {count}" for rank, count in enumerate(self.counts) if count > short)
        return (
            f"The ranks do not save equally often: {who} save(s), while {ahead} so far. The n-th save_checkpoint() of "
            "all ranks makes one checkpoint: call it the same number of times on all of them, or on rank 0 alone."
        )


@dataclass(frozen=True)
class Cut:
    """The parts that make one checkpoint, by rank, that of rank 0 among them."""

    id: int
    parts: tuple[Part, ...]


class Ledger:
    """The saves of one attempt. `former_savers` have saved in an attempt before it, `former_owners` something of their
    own; `abstainers` were known to do nothing of the kind."""

    def __init__(
        self,
        world_size: int,
        first_id: int,
        first_iteration: int = 0,
        former_savers: Iterable[int] = (),
        former_owners: Iterable[int] = (),
        abstainers: Iterable[int] = (),
        most_waiting: int = MOST_WAITING,
    ):
        self.world_size, self._first_id, self._first_iteration = world_size, first_id, first_iteration
        self._most_waiting = most_waiting
        self._parts: dict[int, dict[int, Part]] = {}
        self._writing: dict[int, set[int]] = {}
        self._counts = [0] * world_size
        self._most = 0
        self._fewest: int | None = None
        """Saves of a rank that has ended, of those that save; rank 0 has to."""
        self._ended: set[int] = set()
        self._savers, self._former_savers = {0}, frozenset(former_savers)
        self._unknown = set(range(1, world_size)) - set(abstainers)
        self._mute: set[int] = set(abstainers)
        """Ranks of which nothing is expected, neither saves nor reports, unless they do one or the other."""
        self._last_done = first_id - 1
        self.failed: dict[int, str] = {}
        """Checkpoints that could not be written, and why."""
        self._owners: set[int] = set(former_owners)
        """Ranks that have given something of their own, or meant to."""
        self._first_save: Part | None = None
        self._last_save: Part | None = None
        """Of rank 0."""
        self._is_leaving = False
        self._lags: dict[int, int] = {}
        """In the last cut, how many more steps than rank 0 each rank had reported when it saved."""
        self._given_up: set[int] = set()
        self._to_drop: set[int] = set()

    @property
    def savers(self) -> frozenset[int]:
        """The ranks that have saved, and rank 0."""
        return frozenset(self._savers)

    @property
    def owners(self) -> frozenset[int]:
        """The ranks that have given something of their own, or meant to."""
        return frozenset(self._owners)

    @property
    def mute(self) -> frozenset[int]:
        """The ranks that neither save nor report."""
        return frozenset(self._mute)

    @property
    def is_proven(self) -> bool:
        """Whether rank 0 has been in collectives since it first saved: as all others have, who would have saved too."""
        first, last = self._first_save, self._last_save
        if first is None or last is None or first.num_collectives is None or last.num_collectives is None:
            return False
        return last.num_collectives - first.num_collectives >= 2

    @property
    def is_waiting(self) -> bool:
        """Whether there is a checkpoint that something else than a part, too, could complete."""
        return bool(self._parts)

    def begin(self, rank: int, id: int) -> None:
        """The rank has begun to write its part: it is rank 0, or has something of its own. It may have been faster than
        this message, or have failed already."""
        self._count(rank, id)
        if rank:
            self._owners.add(rank)
        if id > self._last_done and rank not in self._parts.get(id, {}) and id not in self._given_up:
            self._writing.setdefault(id, set()).add(rank)

    def add(self, part: Part) -> None:
        """The part is durable. One that comes too late, from a rank that seemed not to save, is left out."""
        self._count(part.rank, part.id)
        self._writing.get(part.id, set()).discard(part.rank)
        if part.has_own:
            self._owners.add(part.rank)
        if part.rank == 0:
            self._first_save, self._last_save = self._first_save or part, part
        if part.id in self._given_up or part.id <= self._last_done:
            self._to_drop.add(part.id)
            return
        self._parts.setdefault(part.id, {})[part.rank] = part

    def is_too_late(self, part: Part) -> bool:
        """Whether the checkpoint was committed without it."""
        return part.id <= self._last_done

    def fail(self, rank: int, id: int, reason: str = "") -> None:
        """The part could not be written: this checkpoint will not be."""
        self._count(rank, id)
        self._writing.get(id, set()).discard(rank)
        self.failed.setdefault(id, reason)
        if rank:
            self._owners.add(rank)
        if id > self._last_done:
            self._given_up.add(id)
            self._drop(id)

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
        self._mute.discard(rank)

    def take_complete(
        self,
        num_reports: Sequence[int],
        num_settled: Sequence[int] | None = None,
        saving_s: float = 0.0,
        proven_s: float = 0.0,
    ) -> list[Cut]:
        """Those that count from now on, oldest first. `num_reports` are the reports of this attempt, by rank;
        `num_settled` those of them before which every save has been told, if that is less; `saving_s` is the time since
        rank 0 has first saved, `proven_s` that since `is_proven`."""
        while self._unknown:
            # one is enough to wait for; to ask all of them each time would make many ranks slow
            rank = next(iter(self._unknown))
            if not self._abstains(rank, num_reports if num_settled is None else num_settled):
                may_be = self._is_unheard_of(rank, num_reports) or self._has_passed(rank, num_reports)
                if not (saving_s >= SILENCE_S and may_be) and proven_s < PROOF_S:
                    return []
                self._mute.add(rank)
            self._unknown.discard(rank)
        whole = [id for id, parts in self._parts.items() if self._savers <= parts.keys()]
        for id in [id for id in whole if self._is_mixed(self._parts[id])]:
            self._given_up.add(id)
            self._drop(id)
            whole.remove(id)
        return self._take(id for id in whole if self._have_reported(self._parts[id][0].iteration, num_reports))

    def _is_mixed(self, parts: dict[int, Part]) -> bool:
        """Whether they were saved at different steps, because ranks were told to end and have done so when they saw it.
        That rank 0 saves before it reports a step, and others after that, is not meant."""
        if not self._is_leaving or not any(part.has_own for part in parts.values()):
            return False
        lags = {rank: part.iteration - parts[0].iteration for rank, part in parts.items()}
        return any(lag != self._lags.get(rank, 0) for rank, lag in lags.items())

    def _have_reported(self, iteration: int, num_reports: Sequence[int]) -> bool:
        """Whether every rank that reports has made all reports up to there."""
        return all(
            self._first_iteration + count >= iteration or (count == 0 and (rank in self._ended or rank in self._mute))
            for rank, count in enumerate(num_reports)
        )

    def take_salvage(self, num_reports: Sequence[int]) -> list[Cut]:
        """At the end of the attempt, when nothing more will come: those that are complete without the parts that are
        missing. A part is not missed if its rank had reported all steps up to the checkpoint, and no rank has anything
        of its own in it, nor would this one have had: then the shared state, which is rank 0's, is all there is.

        A rank that has not saved yet is taken for one that does not, if it has reported more than rank 0 had when it
        first saved; or if neither of them reports.
        """
        passed = {rank for rank in self._unknown - self._former_savers if self._has_passed(rank, num_reports)}
        self._unknown -= {rank for rank in self._unknown if rank in passed or self._abstains(rank, num_reports)}

        def can_do_without(rank: int, parts: dict[int, Part]) -> bool:
            if rank in parts or not (rank in self._savers or rank in self._unknown):
                return True
            if rank in self._unknown - self._former_savers:
                return self._is_unheard_of(rank, num_reports) and self._reports_nothing()
            return rank not in self._owners and not any(part.has_own for part in parts.values())

        return self._take(
            id
            for id, parts in self._parts.items()
            if 0 in parts
            and self._have_reported(parts[0].iteration, num_reports)
            and all(can_do_without(rank, parts) for rank in range(self.world_size))
        )

    def give_up_excess(self) -> None:
        """Where a rank is far behind, not every checkpoint can wait for it: the oldest and the newest do, and some that
        are evenly spread between them, so that it need not catch up with all to have one that counts. What takes no
        room does not count. For when all ranks have been heard: what is merely unread is not behind."""
        waiting = [id for id, parts in sorted(self._parts.items()) if any(part.files for part in parts.values())]
        while len(waiting) > self._most_waiting:
            middle = range(1, len(waiting) - 1)
            closest = min(middle, key=lambda index: waiting[index + 1] - waiting[index - 1], default=0)
            id = waiting.pop(closest)
            self._given_up.add(id)
            self._drop(id)

    def _drop(self, id: int) -> None:
        self._parts.pop(id, None)
        self._writing.pop(id, None)
        self._to_drop.add(id)

    def take_lost(self) -> list[int]:
        """The ids of checkpoints of which something was put, and which will never be: a later one is complete, too many
        waited, or a part came too late."""
        for id in {*self._parts, *self._writing}:
            if id <= self._last_done:
                self._drop(id)
        lost, self._to_drop = sorted(self._to_drop), set()
        return lost

    def take_rest(self) -> list[int]:
        """The attempt is over: the ids of all that was begun and is not complete."""
        for id in {*self._parts, *self._writing}:
            self._drop(id)
        return self.take_lost()

    def is_hopeful(self, gone: Iterable[int] = ()) -> bool:
        """Whether a checkpoint is on its way that could still become complete without the ranks that are gone."""
        gone = set(gone)
        return any(
            all(rank in self._parts.get(id, {}) or (rank in writing and rank not in gone) for rank in self._savers)
            for id, writing in self._writing.items()
            if writing
        )

    def find(self, id: int, rank: int = 0) -> tuple[int, dict[int, Part]] | None:
        """For this rank, the parts that make up this checkpoint so far, or the next one that was not given up, once
        that of rank 0 is among them, and its own if it has something of its own."""
        needed = {0, rank} if rank in self._owners else {0}
        wanted = min((one for one, parts in self._parts.items() if one >= id and needed <= parts.keys()), default=None)
        if wanted is None or (wanted != id and id not in self._given_up):
            return None
        return wanted, self._parts[wanted]

    def is_given_up(self, id: int) -> bool:
        return id in self._given_up

    def leave(self) -> None:
        """The ranks were asked to end, and may do so at different steps: from now on, only the end of a rank shows that
        it does not save, and parts of different steps make no checkpoint if one of them is a rank's own."""
        self._is_leaving = True

    def mismatch(self) -> SaveMismatch | None:
        """Known as soon as one rank that saves has ended and another has saved more often. Asked after every event."""
        if self._fewest is None or self._fewest == self._most:
            return None
        return SaveMismatch(tuple(self._counts), tuple(sorted(self._ended)))

    def _abstains(self, rank: int, num_reports: Sequence[int]) -> bool:
        if rank in self._ended or self._is_leaving:
            return rank in self._ended
        first = self._first_save
        # by more than one report: a rank may well report a step and then save it, where rank 0 does it the other way
        return first is not None and self._first_iteration + num_reports[rank] > first.iteration + 1

    def _has_passed(self, rank: int, num_reports: Sequence[int]) -> bool:
        """Whether it has reported more than rank 0 had when it first saved. If all ranks report and save in the same
        order, as nearly all do, it then does not save: enough if nothing better can be known any more."""
        first = self._first_save
        if first is None or self._is_leaving or rank in self._former_savers:
            return False
        return self._first_iteration + num_reports[rank] > first.iteration

    def _is_unheard_of(self, rank: int, num_reports: Sequence[int]) -> bool:
        return not num_reports[rank] and rank not in self._former_savers

    def _reports_nothing(self) -> bool:
        """Whether rank 0 does not report, so that reports of others cannot be expected."""
        return self._last_save is not None and self._last_save.iteration == self._first_iteration

    def _take(self, ids: Iterable[int]) -> list[Cut]:
        cuts = [Cut(id, tuple(self._parts[id][rank] for rank in sorted(self._parts[id]))) for id in sorted(ids)]
        for cut in cuts:
            self._lags = {part.rank: part.iteration - cut.parts[0].iteration for part in cut.parts}
            del self._parts[cut.id]
            self._writing.pop(cut.id, None)
            self._last_done = max(self._last_done, cut.id)
        return cuts
