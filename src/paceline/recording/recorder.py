"""One run as it is recorded: what ranks send goes in, steps and checkpoints come out, durable and told.

    report       paired with those of the other ranks; a whole step goes to the run folder, to the callbacks, and to
                 `on_step`. It carries its number, as the session stamps it
    rows         what its shards have handed out, with a report or before a save; goes to the run folder as it is
    part         one rank's share of a checkpoint; with the last of them, and the steps before it, it is committed
    strategy     which checkpoints to keep from now on
    progress     how much is done, from 0 to 1, for who shows it
    note         a line of events.jsonl

Whoever feeds it decides what is tried and when it ends; here nothing is decided. It knows no workers: a controller
feeds it from many, a loop on rank 0 from its own process.
"""

import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

from paceline.callbacks.dispatch import CallbackList
from paceline.checkpoints import CheckpointInfo
from paceline.checkpoints.part import Found, Part
from paceline.checkpoints.saver import Start
from paceline.checkpoints.storage.landmark import Landmark
from paceline.errors import ArgumentError, CheckpointError
from paceline.recording.gather import Gather, Mismatch, Report, Step
from paceline.recording.ledger import MOST_WAITING, Cut, Ledger, SaveMismatch
from paceline.recording.saved import Saved
from paceline.runs import RunFolder, RunRequest
from paceline.workers.reports import ROWS
from paceline.workers.stacks import rank_names

logger = logging.getLogger(__name__)

MUTE_S = 10.0
"""How long the reports of rank 0 wait for the first one of another rank."""


class Recorder:
    """From `open` to `close`, with one `begin` for each attempt. Not thread-safe."""

    def __init__(
        self,
        request: RunRequest,
        folder: RunFolder,
        callbacks: CallbackList,
        checkpoint_root: str,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.request, self.folder, self.callbacks = request, folder, callbacks
        self.attempt = folder.first_attempt
        self.on_step: Callable[[list[Report]], None] | None = None
        """Called with each whole step, a copy, after the run folder and the callbacks have got it: the reports of all
        ranks that report, in rank order."""
        self.saved = Saved(request, checkpoint_root, is_resumed=self.attempt > 0)
        self._gather, self._ledger = Gather(1), Ledger(1, first_id=1)
        self._former_savers: frozenset[int] = frozenset()
        self._former_owners: frozenset[int] = frozenset()
        self._mute: frozenset[int] = frozenset()
        self._clock = clock
        self._waiting_since = self._saving_since = self._proven_since = math.inf
        """Since when the reports of rank 0 wait for ranks that have made none; since when it has saved; and since when
        collectives show that all ranks had come so far."""
        self._has_told_mute = False
        self._heard: list[int] = [0]
        self._settled: list[int] = [0]
        """The reports of each rank at the last `tick`, and at the one before: see there."""
        self._world_size: int | None = None
        self._is_settled = True
        self._owner_pid = os.getpid()

    def open(self, num_workers: float, world_size: int) -> None:
        """The run begins. Raises what a callback's start_training raises. From here on, `close` is due in any case."""
        self._world_size = world_size
        self.folder.set_state("RUNNING")
        self.folder.start_heartbeat()
        self.folder.record_environment()
        self.callbacks.start_training(
            str(self.folder.path),
            dict(self.request.config),
            run_id=self.folder.path.name,
            num_workers=num_workers,
            world_size=world_size,
            is_resumed=self.attempt > 0,
        )

    def begin(self, pids: Sequence[int], reason: str = "") -> tuple[Start, tuple[Landmark, ...]]:
        """An attempt begins with these workers, for this reason. Returns where, and how workers know their way."""
        world_size = len(pids)
        self._tell_size(world_size, reason)
        start, landmarks = self.saved.begin(world_size)
        if self.saved.latest is not None:  # of an earlier driver, if it is not of ours
            self._former_savers |= frozenset(self.saved.latest.ranks)
        self._gather, self._is_settled = Gather(world_size), False
        self._ledger = Ledger(
            world_size,
            start.first_id,
            start.iteration,
            self._former_savers,
            self._former_owners,
            self._mute,
            most_waiting=2 if self.saved.is_in_memory else MOST_WAITING,  # the oldest and the newest, at the least
        )
        self._heard = self._settled = [0] * world_size
        self._waiting_since = self._saving_since = self._proven_since = math.inf
        name = (
            start.checkpoint
            if start.checkpoint is None or isinstance(start.checkpoint, str)
            else "a dict given to run()"
        )
        self.folder.set_state("RUNNING", worker_pids=list(pids), attempt=self.attempt)
        self.folder.record_event("attempt", number=self.attempt, resumes_from=name, world_size=world_size)
        if self.request.record_ids:
            self._record_begin(start, world_size)
        return start, landmarks

    def _record_begin(self, start: Start, world_size: int) -> None:
        """By which readers of the rows know which of them count: those that are in the checkpoint it begins with."""
        begins_with = self.saved.latest or self.saved.find_given(start)
        self.folder.record_begin(
            number=self.attempt,
            world_size=world_size,
            first_id=start.first_id,
            iteration=start.iteration,
            checkpoint=None if begins_with is None else begins_with.id,
            ranks=None if begins_with is None else list(begins_with.ranks),
            is_given=self.saved.latest is None and start.checkpoint is not None,
        )

    def _tell_size(self, world_size: int, reason: str) -> None:
        former, self._world_size = self._world_size, world_size
        if former is not None and former != world_size:
            self.folder.record_event("resize", former=former, world_size=world_size, reason=reason)
            self.callbacks.handle_resize(world_size, former=former, reason=reason)

    def take(self, rank: int, kind: str, value: Any) -> None:
        """What a rank's session has sent, in the order in which it did."""
        match kind:
            case "report":
                self.take_report(rank, value)
            case "rows":
                self.folder.record_rows(self.attempt, rank, value)
            case "saving":
                self._ledger.begin(rank, value)
            case "part":
                self._take_part(value)
            case "save_failed":
                id, reason = value
                self._ledger.fail(rank, id, reason)
                self.saved.discard(self._ledger.take_lost())
                self.folder.record_event("save_failed", id=id, rank=rank, reason=reason)
            case "strategy":
                self.saved.strategy = value
            case "progress":
                self.folder.note_progress(value)
                self.callbacks.show_progress(value)
            case "note":
                name, fields = value
                self.folder.record_event(name, rank=rank, **fields)

    def take_report(self, rank: int, report: Report) -> None:
        rows = report.pop(ROWS, None)
        if rows is not None:
            self.folder.record_rows(self.attempt, rank, rows)
        step = self._gather.add(rank, report)
        if step is not None:
            self._deliver(step)

    def take_step(self, reports: list[Report]) -> None:
        """Of all ranks at once, in their order, from who knows them all: nothing is left to be paired."""
        self.folder.record_step(reports[0]["_training_iteration"], self.attempt, reports)
        self._tell_step(reports)

    def end(self, rank: int) -> None:
        """The rank's function has returned."""
        for step in self._gather.end(rank):
            self._deliver(step)
        self._ledger.end(rank)

    def tick(self) -> None:
        """Between two rounds of `take`. A save that was made before a report is told, at the latest, in the round after
        the one in which that report came: only then does the report show that its rank does not save."""
        self._excuse_mute()
        self._settled = self._heard
        if self._ledger.is_waiting:
            self._commit_complete()
            self._ledger.give_up_excess()
            self.saved.discard(self._ledger.take_lost())
        self._heard = list(self._gather.counts)

    def _excuse_mute(self) -> None:
        """Reporting on rank 0 alone is fine; but until a rank has made its first report, it may only be slow."""
        mute = self._gather.mute
        if not mute:
            self._waiting_since = math.inf
        elif self._clock() - self._waiting_since >= MUTE_S:
            self._tell_mute(mute)
            for step in self._gather.excuse(mute):
                self._deliver(step)
        else:
            self._waiting_since = min(self._waiting_since, self._clock())

    def _tell_mute(self, ranks: Sequence[int]) -> None:
        if self._has_told_mute:
            return
        self._has_told_mute = True
        logger.warning(
            "%s: rank 0 reports, and for %g s nothing came from %s: steps are shown without. Call report() on every "
            "rank to see the metrics of all.",
            self.folder.name,
            MUTE_S,
            rank_names(ranks),
        )

    def _commit_complete(self) -> None:
        now = self._clock()
        saving_s, proven_s = now - self._saving_since, now - self._proven_since
        self._commit(self._ledger.take_complete(self._gather.counts, self._settled, saving_s, proven_s))
        self.saved.discard(self._ledger.take_lost())

    def _take_part(self, part: Part) -> None:
        if part.is_alone:
            self._commit([Cut(part.id, (part,))])
            return
        if self._ledger.is_too_late(part):
            logger.warning("Rank %d has saved checkpoint %d after it was committed without it.", part.rank, part.id)
            self.folder.record_event("late_part", id=part.id, rank=part.rank)
        self._ledger.add(part)
        if part.rank == 0:
            self._saving_since = min(self._saving_since, self._clock())
            if self._ledger.is_proven:
                self._proven_since = min(self._proven_since, self._clock())
        self._commit_complete()

    def is_saving(self, gone: Iterable[int] = ()) -> bool:
        """Whether a checkpoint is on its way that could still become complete without the ranks that are gone."""
        return self._ledger.is_hopeful(gone)

    def answer(self, topic: str, value: Any) -> Any:
        """What a rank asks that can be answered at once: for files of a "storage" that it does not see, or to "delete"
        a checkpoint. What goes wrong is the answer too."""
        if topic == "storage":
            return self.saved.relay.answer(value)
        if topic == "delete":
            return self._delete(value)
        return ArgumentError(f"nobody knows an answer to {topic!r}")

    def _delete(self, id: int) -> CheckpointError | None:
        try:
            self.saved.delete(id)
        except CheckpointError as error:
            return error
        except OSError as error:
            return CheckpointError(f"Checkpoint {id} could not be deleted: {error}.")
        self.folder.record_event("checkpoint_deleted", id=id)
        return None

    def find(self, id: int, rank: int = 0) -> Found | CheckpointError | None:
        """Where a rank finds what it has saved; None as long as rank 0 has not saved it too."""
        return self.saved.find(id, rank, self._ledger)

    def leave(self) -> None:
        """The ranks are asked to end. Idempotent."""
        self._ledger.leave()

    def mismatch(self) -> Mismatch | SaveMismatch | None:
        """What the ranks have done unequally often, as soon as it is known."""
        return self._gather.mismatch() or self._ledger.mismatch()

    def settle(self) -> None:
        """The attempt is over and nothing more will come of it: commit what is complete all the same, and keep the
        reports that no other rank has matched. Idempotent."""
        if self._is_settled:
            return
        self._is_settled = True
        counts, ledger = self._gather.counts, self._ledger
        proven_s = math.inf if ledger.is_proven else 0.0  # all that was sent has been heard
        try:
            self._commit([*ledger.take_complete(counts, proven_s=proven_s), *ledger.take_salvage(counts)])
        finally:  # a callback may raise
            self.saved.discard(self._ledger.take_rest())
            self._former_savers |= self._ledger.savers
            self._former_owners |= self._ledger.owners
            self._mute = self._ledger.mute
            for step in self._gather.leftovers():
                self._record(step)

    def restart(self, reason: str, cause: str) -> None:
        """The function will be started again."""
        self.attempt += 1
        self.folder.record_event("restart", number=self.attempt, reason=reason, cause=cause)
        self.callbacks.handle_restart(self.attempt, reason, cause=cause)

    def close(self, state: str, reason: str | None, error: BaseException | None) -> None:
        """The run has ended so. Callbacks learn it first, and readers of the folder last, whatever goes wrong here.
        Nothing happens in a fork of the process that records it: there the run goes on."""
        if self._owner_pid != os.getpid():
            return
        with ExitStack() as stack:
            stack.callback(self.folder.close)
            stack.callback(self.folder.set_state, state, reason=reason)
            stack.callback(self.callbacks.finish_training, error=state == "FAILED", exception=error, status=state)
            stack.callback(self.folder.record_event, "end", state=state, reason=reason)
            stack.callback(self.saved.close)
            self.settle()

    def _deliver(self, step: Step) -> None:
        self._record(step)
        if step[0] is None:  # late: the others' were told long ago
            return
        self._tell_step([report for report in step if report is not None])

    def _tell_step(self, reports: list[Report]) -> None:
        if self.on_step is None:
            self.callbacks.handle_result(reports)
            return
        copy = [dict(report) for report in reports]  # callbacks may do with theirs as they like
        self.callbacks.handle_result(reports)
        self.on_step(copy)

    def _record(self, step: Step) -> None:
        number = next(report["_training_iteration"] for report in step if report is not None)
        self.folder.record_step(number, self.attempt, step)

    def _commit(self, cuts: Sequence[Cut]) -> None:
        """All of them are checkpoints, and events, before the first callback hears of one; and none is deleted before
        the last has."""
        if not cuts:
            return
        self.folder.sync()  # the steps before a checkpoint belong to it: nobody will report them again
        infos: list[CheckpointInfo] = []
        try:
            for cut in cuts:
                infos += self._commit_one(cut)
        finally:
            self._tell(infos)

    def _commit_one(self, cut: Cut) -> list[CheckpointInfo]:
        result = self.saved.commit(cut)
        if isinstance(result, CheckpointInfo):
            self.folder.record_event("checkpoint", id=result.id, path=result.path, score=result.score)
            return [result]
        self._ledger.failed[cut.id] = str(result)
        self.folder.record_event("save_failed", id=cut.id, rank=None, reason=str(result))
        return []

    def _tell(self, infos: Sequence[CheckpointInfo]) -> None:
        """Callbacks get each of them; what one of them raises first is raised when they have."""
        errors: list[Exception] = []
        try:
            for info in infos:
                try:
                    self.callbacks.handle_checkpoint(info)
                except Exception as error:
                    errors.append(error)
        finally:
            if infos:
                self.saved.prune()
        if errors:
            raise errors[0]
