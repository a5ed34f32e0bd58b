"""The driver's side of one run: poll the workers, decide what the facts mean, act, until the run has ended.

open       run folder, run.json, callbacks' start_training
attempt    ready the workers, submit the function, then poll: reports become steps; callbacks and the run folder
           get each step before the caller does
failure    wait a moment for a better explanation, then decide (see `failure`): restart from the last committed
           checkpoint, or give up
notice     a worker, or this process, will be taken away: the function gets a grace period in which to save, then the
           run goes on without what is gone, or ends
room       there could be more workers: at the next committed checkpoint the function starts again with them
close      workers that may be out of step are ended, status.json, callbacks' finish_training: always, once
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Any

from paceline.backends.base import BackendConfig
from paceline.callbacks.dispatch import CallbackList
from paceline.checkpoints import CheckpointInfo
from paceline.checkpoints.storage.relay import StorageRelay
from paceline.control.attempt import Attempt
from paceline.control.crew import POLL_S, Crew
from paceline.control.failure import Decision, Facts, GiveUp, Restart, decide, settle_s
from paceline.control.gather import Gather, Report
from paceline.control.plan import Plan
from paceline.control.saved import ResumePoint, Saved
from paceline.control.termination import Terminated, on_sigterm
from paceline.errors import WorkersLostError, WorkerStartError
from paceline.runs import RunFolder
from paceline.session import Task, train
from paceline.workers.base import Asked, Call, Died, Event, Preempted, Printed, Raised, Returned, Sent, WorkerGroup

logger = logging.getLogger(__name__)

SAVE_GRACE_S = 30.0
"""How long a failing run waits for a checkpoint that is being written."""

ROOM_LOOK_S = 1.0
"""How often to ask whether there could be more workers."""


class Controller:
    """One run. `steps()` is the run: whoever iterates over it drives it."""

    def __init__(
        self,
        crew: Crew,
        backend: BackendConfig,
        plan: Plan,
        folder: RunFolder,
        callbacks: CallbackList,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.plan, self.folder = plan, folder
        self.values: list[Any] | None = None
        self.saved = Saved(plan)
        self.attempt = folder.first_attempt
        self._budget = plan.budget
        self._relay = StorageRelay(
            plan.checkpoint_root if plan.strategy.num_to_keep != 0 else None,
            plan.checkpoint if isinstance(plan.checkpoint, str) else None,
        )
        self._crew, self._backend, self._callbacks, self._clock = crew, backend, callbacks, clock
        self._ready: deque[list[Report]] = deque()
        self._attempt: Attempt | None = None
        self._stop_requested = self._announced = False
        self._terminated_at: float | None = None
        self._restore_sigterm: Callable[[], None] = lambda: None
        self._world_size = crew.world_size
        self._reason = "the run has begun"

    def steps(self) -> Iterator[list[Report]]:
        """Run to the end, handing out each step: a list of reports in rank order. Closing it stops the run.

        The first item is an empty list and says that the function has begun on all ranks.
        """
        state = "STOPPED"
        error: BaseException | None = None
        self._open()
        try:
            while (decision := (yield from self._run_attempt())) is not None:
                self._act_on(decision)
            if self._terminated_at is not None:
                raise Terminated
            state = "STOPPED" if self._stop_requested else "SUCCEEDED"
        except (GeneratorExit, KeyboardInterrupt, Terminated) as caught:
            error = caught
            raise
        except BaseException as caught:
            state, error = "FAILED", caught
            raise
        finally:
            self._close(state, error)

    def request_stop(self) -> None:
        """Make `should_stop()` true on every rank; the run ends when the function returns. Thread-safe."""
        self._stop_requested = True
        attempt = self._attempt
        if attempt is not None:
            attempt.group.request_stop()

    def finish_saving(self) -> None:
        """Between two steps: wait until the checkpoint that is being written is committed, or has failed."""
        attempt, deadline = self._attempt, self._clock() + SAVE_GRACE_S
        while attempt is not None and self.saved.num_in_progress and not attempt.facts and self._clock() < deadline:
            attempt.group.poll(POLL_S, self._take)

    def _on_sigterm(self) -> None:
        """In a signal handler: only leave a note, which the loop finds."""
        self._terminated_at = self._clock()

    def _look_for_sigterm(self) -> None:
        """Let the function save and return; the run then ends, and so does this process."""
        if self._terminated_at is not None and not self._stop_requested:
            self.folder.record_event("terminated", reason="SIGTERM", grace_s=self.plan.grace_s)
            self.request_stop()

    def _open(self) -> None:
        self.folder.set_state("RUNNING")
        self.folder.start_heartbeat()
        self.folder.record_environment()
        try:
            self._callbacks.start_training(
                str(self.folder.path),
                self.plan.config,
                run_id=self.folder.path.name,
                num_workers=max(1, self._crew.size.max),
                world_size=self._world_size,
                is_resumed=self.attempt > 0,
            )
        except BaseException as error:
            state = "FAILED" if isinstance(error, Exception) else "STOPPED"
            self.folder.set_state(state, reason=f"a callback did not start: {_reason(error)}")
            self.folder.close()
            raise

    def _run_attempt(self) -> Generator[list[Report], None, Decision | None]:
        """One call of the function on all ranks. Ends with None, or with what to do about a failure."""
        try:
            attempt = self._begin()
        except (WorkersLostError, WorkerStartError) as error:
            return self._decide(Facts(died=[Died(0, f"could not be started: {error}")]))
        if not self._announced:
            self._announced = True
            yield []
        while not self._is_over(attempt):
            attempt.group.poll(self._patience(attempt), self._take)
            self._look_for_hang(attempt)
            self._look_for_room(attempt)
            self._look_for_sigterm()
            self.folder.flush()
            while self._ready:
                step = self._ready.popleft()
                yield step
                attempt.wanted = step[0]["_training_iteration"]
                attempt.grant_turns(self._clock())
        return self._conclude(attempt)

    def _is_over(self, attempt: Attempt) -> bool:
        if attempt.num_ended == attempt.size or self._settled(attempt) or self._is_out_of_time(attempt):
            return True
        return attempt.grows and not attempt.num_ended

    def _is_out_of_time(self, attempt: Attempt) -> bool:
        """Whether the grace period is over, of a worker or of this process."""
        limits = [attempt.deadline, None if self._terminated_at is None else self._terminated_at + self.plan.grace_s]
        return any(limit is not None and self._clock() >= limit for limit in limits)

    def _conclude(self, attempt: Attempt) -> Decision | None:
        attempt.facts.mismatch = attempt.facts.mismatch or attempt.gather.mismatch()
        if attempt.facts or (attempt.facts.preempted and not self._stop_requested):
            decision = self._decide(attempt.facts)
            if isinstance(decision, GiveUp) or self._terminated_at is None:
                return decision
        if self._terminated_at is not None:
            return None
        if attempt.num_ended < attempt.size:
            return Restart("there is room for more workers", "growth")
        self.values = [attempt.values[rank] for rank in sorted(attempt.values)]
        return None

    def _begin(self) -> Attempt:
        group = self._crew.ensure()
        self._restore_sigterm()
        self._restore_sigterm = on_sigterm(self._on_sigterm)  # not earlier: connecting to Ray installs a handler too
        self._tell_size(len(group.infos))
        point = self._find_resume_point()
        self._record_leftovers(point.iteration)
        task = Task(
            fn=self.plan.fn,
            config=self.plan.config if self.plan.takes_config else None,
            backend=self._backend,
            checkpoint_root=self.plan.checkpoint_root,
            strategy=self.plan.strategy,
            resume_from=point.checkpoint,
            first_checkpoint_id=point.next_id,
            first_iteration=point.iteration,
            detailed_metrics=self.plan.detailed_metrics,
            landmarks=self._relay.begin(),
            in_step=self.plan.in_step,
            shards=self.plan.source.cut(group.infos) if self.plan.source else None,
        )
        ranks = range(len(group.infos))
        call = Call(
            train,
            (task,),
            label=f"train_func {getattr(self.plan.fn, '__name__', self.plan.fn)!r}, or its config,",
        )
        self._attempt = Attempt(group, Gather(len(ranks)), [self._clock()] * len(ranks))
        self.folder.set_state("RUNNING", worker_pids=[info.pid for info in group.infos], attempt=self.attempt)
        self.folder.record_event("attempt", number=self.attempt, resumes_from=point.name, world_size=len(ranks))
        group.submit(dict.fromkeys(ranks, call), {rank: self.folder.log_path(rank) for rank in ranks})
        if self._stop_requested:
            group.request_stop()
        return self._attempt

    def _tell_size(self, world_size: int) -> None:
        former, self._world_size = self._world_size, world_size
        if former != world_size:
            self.folder.record_event("resize", former=former, world_size=world_size, reason=self._reason)
            self._callbacks.handle_resize(world_size, former=former, reason=self._reason)

    def _find_resume_point(self) -> ResumePoint:
        for info in self.saved.look() if self.attempt else ():
            if self._attempt is not None:  # otherwise an earlier driver has told
                self._tell_commit(info)
        return self.saved.resume_point()

    def _record_leftovers(self, iteration: int) -> None:
        """Keep what the last attempt reported about steps that will not be made again, although a rank died before it
        could report them too."""
        former = self._attempt
        for reports in former.gather.leftovers() if former is not None else ():
            step = next(iter(reports.values()))["_training_iteration"]
            if former is not None and step <= iteration:
                ranks = [reports.get(rank) for rank in range(former.size)]
                self.folder.record_step(step, self.attempt - 1, ranks)

    def _take(self, event: Event) -> None:
        attempt = self._attempt
        assert attempt is not None
        match event:
            case Sent(rank, "report", report):
                attempt.progress[rank] = self._clock()
                step = attempt.gather.add(rank, report)
                if step is not None:
                    self._deliver(step)
            case Sent(rank, kind, value):
                attempt.progress[rank] = self._clock()
                self._take_message(rank, kind, value)
            case Returned(rank, (value, is_intact)):
                attempt.values[rank] = value
                attempt.gather.end(rank)
                if not is_intact:
                    self._crew.mark_unfit()
            case Raised():
                attempt.facts.raised.append(event)
            case Preempted(rank, reason):
                self._take_notice(attempt, rank, reason)
            case Asked(rank, _, "turn"):
                attempt.progress[rank] = self._clock()
                attempt.turns.append(event)
                attempt.grant_turns(self._clock())
            case Asked(rank, _, "storage"):
                attempt.progress[rank] = self._clock()
                self._answer_from_disk(event)
            case Died(rank):
                self._crew.mark_unfit()
                if rank not in attempt.values and all(error.rank != rank for error in attempt.facts.raised):
                    attempt.facts.died.append(event)
            case Printed(rank, text):
                self._crew.on_print(rank, text)
        if attempt.facts.mismatch is None:
            attempt.facts.mismatch = attempt.gather.mismatch()

    def _deliver(self, step: list[Report]) -> None:
        self.folder.record_step(step[0]["_training_iteration"], self.attempt, step)
        self._ready.append([dict(report) for report in step])  # callbacks may do with theirs as they like
        self._callbacks.handle_result(step)

    def _answer_from_disk(self, question: Asked) -> None:
        """For a worker that does not see this machine's disk."""
        assert self._attempt is not None
        self._attempt.group.answer(question, self._relay.answer(question.value))

    def _take_notice(self, attempt: Attempt, rank: int, reason: str) -> None:
        """A worker will be taken away. All ranks are asked to stop, since none gets far without the others."""
        self.folder.record_event("preempted", rank=rank, reason=reason, grace_s=self.plan.grace_s)
        self._crew.mark_unfit()
        attempt.facts.preempted[rank] = reason
        if attempt.deadline is None:
            attempt.deadline = self._clock() + self.plan.grace_s
            attempt.group.request_stop()

    def _look_for_room(self, attempt: Attempt) -> None:
        if attempt.size < self._crew.size.max and self._clock() >= attempt.next_look:
            attempt.next_look = self._clock() + ROOM_LOOK_S
            attempt.has_room = attempt.group.can_grow()

    def _take_message(self, rank: int, kind: str, value: Any) -> None:
        if kind == "saving":
            self.saved.num_in_progress += 1
        elif kind == "committed":
            self.saved.num_in_progress -= 1
            if self.saved.is_news(value):
                self._tell_commit(value)
        elif kind == "save_failed":
            self.saved.num_in_progress -= 1
            self.folder.record_event("save_failed", reason=value)
        elif kind == "kept":
            self.saved.kept = value
            self._grow_if_there_is_room()
        elif kind == "note":
            name, fields = value
            self.folder.record_event(name, rank=rank, **fields)

    def _tell_commit(self, info: CheckpointInfo) -> None:
        self.folder.record_event("checkpoint", id=info.id, path=info.path, score=info.score)
        self._callbacks.handle_checkpoint(info)
        self._grow_if_there_is_room()

    def _grow_if_there_is_room(self) -> None:
        """Nothing that counts is lost now: the next attempt goes on from the checkpoint just committed."""
        if self._attempt is not None and self._attempt.has_room:
            self._attempt.grows = True

    def _settled(self, attempt: Attempt) -> bool:
        """Whether something went wrong, and nothing better is to be expected as its explanation."""
        if not attempt.facts:
            return False
        if attempt.trouble_at is None:
            attempt.trouble_at = self._clock()
        return self._clock() - attempt.trouble_at >= settle_s(attempt.facts, self._backend.is_broken_collective)

    def _patience(self, attempt: Attempt) -> float:
        return POLL_S if attempt.trouble_at is None else POLL_S / 10

    def _look_for_hang(self, attempt: Attempt) -> None:
        limit = self.plan.hang_timeout_s
        if limit is None or attempt.facts:
            return
        slowest = attempt.silent_rank()
        if slowest is None:
            return
        idle_s = self._clock() - attempt.progress[slowest]
        if idle_s > limit:
            path = self._dump_stacks(attempt.group)
            reason = (
                f"made no progress for {idle_s:.1f} s (hang_timeout_s={limit:g}); stacks of all ranks are in {path}"
            )
            self.folder.record_event("hang", rank=slowest, idle_s=idle_s, stacks=path)
            attempt.facts.died.append(Died(slowest, reason))

    def _dump_stacks(self, group: WorkerGroup) -> str:
        path = self.folder.logs_dir / f"stacks_{self.attempt}.txt"
        texts = [f"=== rank {rank} ===\n{text}" for rank, text in sorted(group.stacks().items())]
        path.write_text("\n".join(texts))
        return str(path)

    def _decide(self, facts: Facts) -> Decision:
        for died in facts.died:
            self.folder.record_event("worker_died", rank=died.rank, reason=died.reason)
        return decide(facts, is_suspect=self._backend.is_broken_collective, budget=self._budget)

    def _act_on(self, decision: Decision) -> None:
        if isinstance(decision, GiveUp):
            decision.error.add_note(f"The run folder, with the logs of all ranks, is {self.folder.path}")
            raise decision.error
        assert isinstance(decision, Restart)
        self._release(SAVE_GRACE_S)
        self.attempt += 1
        self._budget = self._budget.after(decision.cause)
        self._reason = decision.reason
        level = logging.INFO if decision.cause == "growth" else logging.WARNING
        logger.log(level, "%s: %s; starting again (restart %d).", self.folder.name, decision.reason, self.attempt)
        self.folder.record_event("restart", number=self.attempt, reason=decision.reason, cause=decision.cause)
        self._callbacks.handle_restart(self.attempt, decision.reason, cause=decision.cause)

    def _release(self, grace_s: float) -> None:
        """End the attempt. A checkpoint that rank 0 is just writing may be finished first: it was saved in time."""
        attempt, deadline = self._attempt, self._clock() + grace_s
        if attempt is not None:
            rank_0_is_gone = any(died.rank == 0 for died in attempt.facts.died)
            while self.saved.num_in_progress > 0 and not rank_0_is_gone and self._clock() < deadline:
                attempt.group.poll(POLL_S, self._take_rest)
        self.saved.num_in_progress = 0
        self._close_source()  # first: who waits for data will not wait for ever
        self._crew.release(self._take_rest)

    def _close_source(self) -> None:
        if self.plan.source is not None:
            self.plan.source.close()

    def _take_rest(self, event: Event) -> None:
        """From an attempt that is over: what it did still counts, how it ends does not. In particular, a step must not
        be forgotten whose checkpoint may turn out to be the one to go on from."""
        match event:
            case Sent(_, "saving"):
                pass
            case Sent() | Printed() | Asked(_, _, "storage"):
                self._take(event)
            case Died(0):
                self.saved.num_in_progress = 0

    def _close(self, state: str, error: BaseException | None) -> None:
        reason = None if error is None else _reason(error)
        if isinstance(error, GeneratorExit):
            reason = self.plan.abandoned
        try:
            if error is not None:  # otherwise all ranks have returned, and stay for the next run
                self._release(SAVE_GRACE_S if isinstance(error, Exception) else 0.0)
        except Exception as second:
            assert error is not None
            error.add_note(f"After this, the last results could not be handled: {type(second).__name__}: {second}")
        finally:
            self._attempt = None
            self._close_source()
            self._relay.close()
            self._restore_sigterm()
            self._tell_the_end(state, reason, error)

    def _tell_the_end(self, state: str, reason: str | None, error: BaseException | None) -> None:
        self.folder.record_event("end", state=state, reason=reason)
        try:
            self._callbacks.finish_training(error=state == "FAILED", exception=error, status=state)
        finally:
            self.folder.set_state(state, reason=reason)
            self.folder.close()


def _reason(error: BaseException) -> str:
    if isinstance(error, Terminated):
        return "the driver got SIGTERM"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted from the keyboard"
    return f"{type(error).__qualname__}: {error}"
