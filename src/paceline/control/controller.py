"""The driver's side of one run: poll the workers, decide what the facts mean, act, until the run has ended.

begin      ready the workers, tell the recorder, submit the function
attempt    poll: what workers send goes to the recorder, how they fare into the attempt's facts (see `attempt` for its
           phases), and each whole step to the caller
conclude   decide what the facts mean (see `outcome`): finished, stopped, again from the last checkpoint, or given up
close      workers that may be out of step are ended, and the recorder closes the run: always, once

Reports, checkpoints, the run folder and callbacks are the recorder's business.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from paceline.backends.base import BackendConfig
from paceline.control.attempt import Attempt, Facts, Phase, StopAgreement, Wish, advance
from paceline.control.crew import POLL_S, Crew, join_limit
from paceline.control.outcome import Budget, GiveUp, Outcome, Restart, Stop, conclude
from paceline.control.termination import Signals, Terminated
from paceline.control.watch import Watch
from paceline.errors import WorkersLostError, WorkerStartError
from paceline.rank_session import Task
from paceline.recording.gather import Report
from paceline.recording.recorder import Recorder
from paceline.session import train
from paceline.workers.base import Asked, Call, Died, Event, Preempted, Printed, Raised, Returned, Sent
from paceline.workers.outcome import message_of

logger = logging.getLogger(__name__)

SAVE_GRACE_S = 30.0
"""How long a failing run waits for a checkpoint that is being written."""

STOP_PATIENCE_S = 10.0
"""How long ranks that could stop wait for one that has not looked at it yet, if the grace period is long enough."""


@dataclass(frozen=True)
class Limits:
    """How much a run may go through: restarts, seconds of silence, seconds to leave."""

    budget: Budget = field(default_factory=Budget)
    grace_s: float = 30.0
    hang_timeout_s: float | None = None


class Controller:
    """One run. `steps()` is the run: whoever iterates over it drives it."""

    def __init__(
        self,
        crew: Crew,
        backend: BackendConfig,
        limits: Limits,
        recorder: Recorder,
        signals: Signals | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.recorder = recorder
        self.values: list[Any] | None = None
        self._crew, self._backend, self._limits, self._clock = crew, backend, limits, clock
        self._request, self._folder = recorder.request, recorder.folder
        self._budget = limits.budget
        self._steps: deque[list[Report]] = deque()
        recorder.on_step = self._steps.append
        self._attempt: Attempt | None = None
        self._signals = signals or Signals(clock)
        self._signals.on_wish = self._tell_group
        recorder.callbacks.calling = self._signals.raising
        self._stop: Wish | None = None
        self._told_wish: Wish | None = None
        self._heeded: Wish | None = None
        self._busy_s = self._round_at = 0.0
        self._is_announced = False
        self._reason = "the run has begun"

    def steps(self) -> Iterator[list[Report]]:
        """Run to the end, handing out each step: a list of reports in rank order. Closing it stops the run.

        The first item is an empty list and says that the function has begun on all ranks.
        """
        state = "STOPPED"
        error: BaseException | None = None
        owner_pid = os.getpid()
        try:
            self._signals.watch()
            self.recorder.open(max(1, self._crew.size.max), self._crew.world_size)
            self._crew.output.show = self.recorder.callbacks.show_unfinished
            while isinstance(outcome := (yield from self._run_attempt()), Restart):
                self._restart(outcome)
            self._finish(outcome)
            state = "STOPPED" if isinstance(outcome, Stop) else "SUCCEEDED"
        except GeneratorExit as caught:
            error = caught
            if self._signals.wish is None or os.getpid() != owner_pid:
                raise
        except Terminated as caught:
            error = caught
            raise
        except KeyboardInterrupt as caught:
            error = caught
            caught.args = caught.args or (self._farewell(),)
            raise
        except BaseException as caught:
            state, error = "FAILED", caught
            raise
        finally:
            if os.getpid() == owner_pid:  # else this is a fork, in which the run does not go on: it is not ours to end
                self._close(state, error)
        self._leave()  # what came in the meantime came too late for this run

    @property
    def _wish(self) -> Wish | None:
        return self._signals.wish or self._stop

    def request_stop(self) -> None:
        """Make `should_stop()` true on every rank; the run ends when the function returns. Thread-safe."""
        if self._stop is None:
            self._stop = Wish("stop", self._clock())
        attempt = self._attempt
        if attempt is not None:
            attempt.group.request_stop()

    def _tell_group(self) -> None:
        """In a signal handler. The loop finds the wish, too, but it may be in a callback now, or paused; and with
        `num_workers=0`, the function is what this very thread is in."""
        attempt = self._attempt
        if attempt is not None and self._is_inline:
            attempt.group.request_stop()
        elif attempt is not None:  # in a thread: this one may be anywhere
            threading.Thread(target=attempt.group.request_stop, name="paceline-signal", daemon=True).start()

    @property
    def _is_inline(self) -> bool:
        return self._crew.size.max == 0

    def finish_saving(self) -> None:
        """Between two steps: wait until the checkpoint that is being written is committed, or has failed."""
        attempt, deadline = self._attempt, self._clock() + SAVE_GRACE_S
        while attempt is not None and self._is_saving(attempt) and self._is_patient(deadline):
            attempt.group.poll(POLL_S, self._take)
            self._look_for_commit(attempt, self.recorder.tick)

    def _is_saving(self, attempt: Attempt) -> bool:
        return not attempt.facts.is_troubled and self.recorder.is_saving()

    def _run_attempt(self) -> Generator[list[Report], None, Outcome]:
        """One call of the function on all ranks; none, once somebody has wanted the end of a run that was restarted."""
        if self._wish is not None and self._is_announced:
            return Stop()
        try:
            attempt = self._begin()
        except (WorkersLostError, WorkerStartError) as error:
            died = Died(0, f"could not be started: {error}")
            return self._conclude(Facts(self._crew.world_size, died=[died]))
        if not self._is_announced:
            self._is_announced = True
            with self._signals.raising():
                yield []
        while self._advance(attempt) is not Phase.OVER:
            yield from self._go_round(attempt)
        return self._conclude(attempt.facts)

    def _go_round(self, attempt: Attempt) -> Iterator[list[Report]]:
        self._signals.check()
        self._listen(attempt)
        begin = self._clock()
        self._watch.look(begin, self._listened())
        self._answer_stops(attempt)
        self._look_for_commit(attempt, self.recorder.tick)
        self._folder.flush()
        while self._steps:
            step = self._steps.popleft()
            with self._signals.raising():
                yield step
            attempt.wanted = step[0]["_training_iteration"]
            attempt.grant_turns(self._listened())
        self._busy_s += self._clock() - begin

    def _listen(self, attempt: Attempt) -> None:
        """One round. What it takes beyond the wait for the first event is our own business: a slow callback, say."""
        patience_s, begin = self._patience(attempt), self._clock()
        self._round_at = self._listened()
        with self._signals.raising() if self._is_inline else nullcontext():
            attempt.group.poll(patience_s, self._take)
        self._busy_s += max(0.0, self._clock() - begin - patience_s)

    def _listened(self) -> float:
        """A clock that stands still while we are busy: nobody listens to the workers then, and that is no silence of
        theirs."""
        return self._clock() - self._busy_s

    def _look_for_commit(self, attempt: Attempt, act: Callable[[], None]) -> None:
        """Do what may commit a checkpoint, and see what follows from it."""
        latest = self.recorder.saved.latest
        act()
        self._answer_searches(attempt)
        if attempt.facts.has_room and self.recorder.saved.latest is not latest:
            # nothing that counts is lost now: the next attempt goes on from the checkpoint just committed
            attempt.facts.grows = True

    def _begin(self) -> Attempt:
        self._signals.check(1)  # there is nothing to save yet
        with self._signals.raising(1):
            self._crew.renew_if_edited()
            group = self._crew.ensure(join_limit(self._limits.hang_timeout_s))
        self._signals.watch()  # again: connecting to Ray installs a handler too
        start, landmarks = self.recorder.begin([info.pid for info in group.infos], self._reason)
        dataset = self._request.dataset
        task = Task(
            request=self._request.for_workers(),
            start=start,
            backend=self._backend,
            landmarks=landmarks,
            shards=dataset.cut(group.infos) if dataset is not None else None,
            run_dir=str(self._folder.path),
            attempt=self.recorder.attempt,
        )
        ranks = range(len(group.infos))
        call = Call(train, (task,), label=f"train_func {self._request.name!r}, or its config,")
        limits, size = self._limits, self._crew.size
        stops = StopAgreement(min(STOP_PATIENCE_S, limits.grace_s / 3))
        attempt = Attempt(group, Facts(len(ranks)), [self._listened()] * len(ranks), stops=stops)
        self._attempt = attempt
        self._watch = Watch(attempt, self.recorder.attempt, self._folder, limits.hang_timeout_s, size.max)
        group.submit(dict.fromkeys(ranks, call), {rank: self._folder.log_path(rank) for rank in ranks})
        if self._wish is not None:
            group.request_stop()
        return attempt

    def _advance(self, attempt: Attempt) -> Phase:
        former, wish = attempt.state.phase, self._wish
        if wish is not None and wish is not self._told_wish:
            self._told_wish, self._heeded = wish, replace(wish, at=self._clock())
            self._tell_wish(wish)
        attempt.state = advance(
            attempt.state,
            attempt.facts,
            None if wish is None else self._heeded,  # its time begins when we can act on it: we may have been busy
            self._clock(),
            grace_s=self._limits.grace_s,
            is_suspect=self._backend.is_broken_collective,
        )
        is_leaving = wish is not None or attempt.facts.preempted_at is not None
        if is_leaving and former is Phase.RUNNING:
            self.recorder.leave()
            attempt.group.request_stop()  # all ranks: none gets far without the others
        return attempt.state.phase

    def _tell_wish(self, wish: Wish) -> None:
        grace_s = self._limits.grace_s
        if wish.kind == "stop":
            return
        kind, sign = ("terminated", "SIGTERM") if wish.kind == "terminate" else ("interrupted", "Ctrl-C")
        self._folder.record_event(kind, reason=sign, grace_s=grace_s)
        logger.warning(
            "%s: stopping. The function has up to %g s to save and return: should_stop() is true. %s once more ends it "
            "at once.",
            self._folder.name,
            grace_s,
            sign,
        )

    def _take(self, event: Event) -> None:
        attempt = self._attempt
        assert attempt is not None
        facts, recorder = attempt.facts, self.recorder
        match event:
            case Sent(rank, "report", report):
                attempt.progress[rank] = self._round_at
                recorder.take_report(rank, report)
            case Sent(_, "imported", files):
                self._crew.learn_imports(files)
            case Sent(rank, "leaving", _):
                facts.leaving.add(rank)
            case Sent(rank, kind, value):
                attempt.progress[rank] = self._round_at
                self._look_for_commit(attempt, partial(recorder.take, rank, kind, value))
            case Returned(rank, (value, is_intact)):
                facts.values[rank] = value
                recorder.end(rank)
                if not is_intact:
                    self._crew.mark_unfit()
            case Raised():
                facts.raised.append(event)
            case Preempted(rank, reason):
                self._take_notice(facts, rank, reason)
            case Asked(rank):
                attempt.progress[rank] = self._round_at
                self._take_question(attempt, event)
            case Died(rank):
                self._crew.mark_unfit()
                if not facts.has_ended(rank):
                    facts.died.append(event)
            case Printed(rank, text):
                self._crew.output.take(rank, text)
        if facts.values and facts.mismatch is None and self._wish is None and not facts.preempted:
            facts.mismatch = recorder.mismatch()

    def _take_notice(self, facts: Facts, rank: int, reason: str) -> None:
        """A worker will be taken away."""
        self._folder.record_event("preempted", rank=rank, reason=reason, grace_s=self._limits.grace_s)
        self._crew.mark_unfit()
        facts.preempted[rank] = reason
        if facts.preempted_at is None:
            facts.preempted_at = self._clock()

    def _take_question(self, attempt: Attempt, question: Asked) -> None:
        match question.topic:
            case "turn":
                attempt.turns.append(question)
                attempt.grant_turns(self._listened())
            case "storage" | "delete":
                attempt.group.answer(question, self.recorder.answer(question.topic, question.value))
            case "put" | "get":
                for answered, value in attempt.notes.take(question):
                    attempt.group.answer(answered, value)
            case "stop":
                attempt.stops.take(question.rank, question, self._clock())
                self._answer_stops(attempt)
            case "checkpoint":
                attempt.searches.append(question)
                self._answer_searches(attempt)

    def _answer_stops(self, attempt: Attempt) -> None:
        if attempt.stops.waiting:
            for question, answer in attempt.stops.settle(attempt.running(), self._clock()):
                attempt.group.answer(question, answer)

    def _answer_searches(self, attempt: Attempt) -> None:
        searches, attempt.searches = attempt.searches, []
        for question in searches:
            found = self.recorder.find(question.value, question.rank)
            if found is None:
                attempt.searches.append(question)
            else:
                attempt.progress[question.rank] = self._listened()
                attempt.group.answer(question, found)

    def _patience(self, attempt: Attempt) -> float:
        return POLL_S / 10 if attempt.state.phase is Phase.TROUBLED else POLL_S

    def _conclude(self, facts: Facts) -> Outcome:
        for died in facts.died:
            self._folder.record_event("worker_died", rank=died.rank, reason=died.reason)
        return conclude(facts, self._wish, is_suspect=self._backend.is_broken_collective, budget=self._budget)

    def _restart(self, restart: Restart) -> None:
        self._release(SAVE_GRACE_S)
        self._budget = self._budget.after(restart.cause)
        self._reason = restart.reason
        self.recorder.restart(restart.reason, restart.cause)
        level = logging.INFO if restart.cause == "growth" else logging.WARNING
        name, number = self._folder.name, self.recorder.attempt
        logger.log(level, "%s: %s; starting again (restart %d).", name, restart.reason, number)

    def _finish(self, outcome: Outcome) -> None:
        if isinstance(outcome, GiveUp):
            outcome.error.add_note(f"The run folder, with the logs of all ranks, is {self._folder.path}")
            raise outcome.error
        facts = self._attempt.facts if self._attempt is not None else Facts(self._crew.world_size)
        if facts.num_ended < facts.size or facts.is_troubled:  # stopped, and not all could end
            self._release(SAVE_GRACE_S)
        self.values = [facts.values.get(rank) for rank in range(facts.size)]
        self._leave()

    def _leave(self) -> None:
        """What a signal asks for, once everything of the run is done."""
        wish = self._signals.wish
        if wish is not None:
            raise Terminated if wish.kind == "terminate" else KeyboardInterrupt(self._farewell())

    def _farewell(self) -> str:
        if self._folder.state in ("SUCCEEDED", "FAILED"):  # it came while callbacks were told
            return f"the run had {self._folder.state.lower()} before; its folder is {self._folder.path}"
        return f"the run was stopped; its folder, for Trainer.resume, is {self._folder.path}"

    def _release(self, grace_s: float) -> None:
        """End the attempt. A checkpoint that is just being written may be finished first: it was saved in time.

        Whatever goes wrong meanwhile, in a callback that hears of the last results, say, the workers are ended; then
        the first of it is raised.
        """
        attempt, deadline = self._attempt, self._clock() + grace_s
        if attempt is None:  # nobody has been asked to do anything
            return
        errors: list[BaseException] = []

        def take(event: Event) -> None:
            with _kept(errors):
                self._take_rest(event)

        with _kept(errors):
            while self.recorder.is_saving(self._gone(attempt)) and self._is_patient(deadline):
                attempt.group.poll(POLL_S, take)
                if not all(isinstance(error, Exception) for error in errors):
                    break  # somebody wants an end at once
        for act in (
            self._close_dataset,  # first: who waits for data will not wait for ever
            partial(self._crew.release, take),
            self.recorder.settle,
        ):
            with _kept(errors):
                act()
        self._attempt = None
        if errors:
            raise errors[0]

    def _is_patient(self, deadline: float) -> bool:
        return self._clock() < deadline and not self._signals.is_urgent()

    @staticmethod
    def _gone(attempt: Attempt) -> set[int]:
        return {died.rank for died in attempt.facts.died}

    def _close_dataset(self) -> None:
        if self._request.dataset is not None:
            self._request.dataset.close()

    def _take_rest(self, event: Event) -> None:
        """From an attempt that is over: what it did still counts, how it ends does not. In particular, a step must not
        be forgotten whose checkpoint may turn out to be the one to go on from."""
        match event:
            case Sent() | Printed() | Asked(_, _, "storage"):
                self._take(event)
            case Died() if self._attempt is not None:
                self._attempt.facts.died.append(event)

    def _close(self, state: str, error: BaseException | None) -> None:
        reason = None if error is None else _reason(error)
        if isinstance(error, GeneratorExit):
            reason = self._request.abandoned
        try:
            if error is not None:  # otherwise all ranks have returned, and stay for the next run
                self._release(SAVE_GRACE_S if isinstance(error, Exception) else 0.0)
        except Exception as second:
            assert error is not None
            error.add_note(f"After this, the last results could not be handled: {type(second).__name__}: {second}")
        finally:
            self._close_dataset()
            try:
                self._crew.output.end()
                self.recorder.close(state, reason, error)
            except KeyboardInterrupt as interrupt:
                interrupt.args = interrupt.args or (self._farewell(),)
                raise
            finally:
                self._signals.release()


@contextmanager
def _kept(errors: list[BaseException]) -> Iterator[None]:
    """What is raised inside is raised later: something else has to be done first."""
    try:
        yield
    except BaseException as error:
        errors.append(error)


def _reason(error: BaseException) -> str:
    if isinstance(error, Terminated):
        return "the driver got SIGTERM"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted from the keyboard"
    return f"{type(error).__qualname__}: {message_of(error)}"
