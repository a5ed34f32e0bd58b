"""What an attempt that is over means for the run, and what to do about it. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from paceline.control.attempt import Facts, Wish
from paceline.errors import (
    PacelineError,
    ReportMismatchError,
    SaveMismatchError,
    TrainFunctionError,
    WorkersLostError,
)
from paceline.recording.ledger import SaveMismatch
from paceline.workers.base import Raised

Cause = Literal["loss", "preemption", "growth"]


@dataclass(frozen=True)
class Restart:
    """Make the group whole, or larger, and start the function again from the last committed checkpoint."""

    reason: str
    cause: Cause = "loss"


@dataclass(frozen=True)
class Budget:
    """How often a run was restarted, and how often it may be; a negative maximum means always. Machines that are taken
    away on purpose say nothing about the function, so preemptions are counted apart; growing is always welcome."""

    max_retries: int = 3
    max_preemptions: int = -1
    num_losses: int = 0
    num_preemptions: int = 0

    def after(self, cause: Cause) -> "Budget":
        if cause == "loss":
            return replace(self, num_losses=self.num_losses + 1)
        return replace(self, num_preemptions=self.num_preemptions + int(cause == "preemption"))


@dataclass(frozen=True)
class GiveUp:
    """End the run by raising this on the driver."""

    error: BaseException


@dataclass(frozen=True)
class Finish:
    """All is done: the run has succeeded."""


@dataclass(frozen=True)
class Stop:
    """The run ends because somebody wanted it to, with what its ranks have returned so far."""


Outcome = Finish | Stop | Restart | GiveUp


def conclude(facts: Facts, wish: Wish | None, *, is_suspect: Callable[[Raised], bool], budget: "Budget") -> Outcome:
    """An exception of the user's ends the run whatever was wanted of it. Otherwise, who wanted an end gets it: nothing
    is started again, and ranks that saw the wish at different steps have done nothing wrong."""
    outcome = _judge(facts, is_suspect, budget)
    if wish is not None and not (isinstance(outcome, GiveUp) and _is_users(facts, is_suspect)):
        return Stop()
    return outcome


def _is_users(facts: Facts, is_suspect: Callable[[Raised], bool]) -> bool:
    return not facts.died and any(not is_suspect(error) for error in facts.raised)


def _judge(facts: Facts, is_suspect: Callable[[Raised], bool], budget: "Budget") -> Outcome:
    """Deaths and preemptions are retried as far as the budget goes. Exceptions are the user's: never retried.

    A death outranks an exception, since the other ranks' exceptions are usually its echo; a user's own exception
    outranks a preemption and unequal reports or saves; and all of them outrank a broken collective. A worker that dies
    after it was told to leave was preempted; but when all have come to their end by themselves, nothing is left to do.
    """
    lost = [died for died in facts.died if died.rank not in facts.preempted]
    if lost:
        return _retry_loss("; ".join(f"rank {died.rank} {died.reason}" for died in facts.died), budget)
    own = [error for error in facts.raised if not is_suspect(error)]
    if own and not facts.died:
        return GiveUp(as_exception(own[0], facts.raised))
    if facts.preempted and not facts.is_done:
        return _retry_preemption("; ".join(f"rank {rank} {why}" for rank, why in facts.preempted.items()), budget)
    if facts.mismatch is not None:
        kind: type[PacelineError] = (
            SaveMismatchError if isinstance(facts.mismatch, SaveMismatch) else ReportMismatchError
        )
        return GiveUp(kind(str(facts.mismatch)))
    if facts.raised:
        return GiveUp(as_exception(facts.raised[0], facts.raised))
    if facts.num_ended < facts.size:
        return Restart("there is room for more workers", "growth")
    return Finish()


def _retry_loss(reason: str, budget: Budget) -> Outcome:
    if budget.max_retries < 0 or budget.num_losses < budget.max_retries:
        return Restart(reason)
    tried = f"after {budget.num_losses} restart(s)" if budget.num_losses else "and restarts are off"
    return GiveUp(
        WorkersLostError(
            f"Workers were lost {tried} (max_retries={budget.max_retries}). The last time, {reason}. The logs of the "
            "ranks are in the run folder; raise max_retries if the machine is at fault rather than the function."
        )
    )


def _retry_preemption(reason: str, budget: Budget) -> Outcome:
    if budget.max_preemptions < 0 or budget.num_preemptions < budget.max_preemptions:
        return Restart(reason, "preemption")
    return GiveUp(
        WorkersLostError(
            f"Workers were taken away again after {budget.num_preemptions} preemption(s), and "
            f"max_preemptions={budget.max_preemptions}. The last time, {reason}. Continue with "
            "Trainer.resume(run_dir) when machines are there to stay."
        )
    )


def as_exception(error: Raised, all_raised: Sequence[Raised] = ()) -> Exception:
    """The user's exception with its own type, naming the rank and carrying the worker's traceback.

    A TrainFunctionError stands for one that could not travel, that cannot carry the note, or that would mean something
    else here: SystemExit and KeyboardInterrupt, the end of this process; StopIteration, that of a loop.
    """
    exception = error.exception
    stand_in = TrainFunctionError(f"{error.type_name}: {error.message}")
    if not isinstance(exception, Exception) or isinstance(exception, StopIteration):
        exception = stand_in
    note = f"Raised in the training function on rank {error.rank}. Its traceback there:\n\n{error.traceback}"
    others = [f"rank {other.rank}: {other.type_name}: {other.message}" for other in all_raised if other is not error]
    if others:
        note += "\nOther ranks raised too: " + "; ".join(others)
    try:
        exception.add_note(note)
    except BaseException:  # of a frozen dataclass, say
        exception = stand_in
        exception.add_note(note)
    return exception
