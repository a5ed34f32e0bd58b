"""What the facts of a failed attempt mean, and what to do about it. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline.control.gather import Mismatch
from paceline.errors import ReportMismatchError, TrainFunctionError, WorkersLostError
from paceline.workers.base import Died, Raised


@dataclass
class Facts:
    """What is known to have gone wrong in one attempt, in order of arrival."""

    died: list[Died] = field(default_factory=list)
    raised: list[Raised] = field(default_factory=list)
    mismatch: Mismatch | None = None

    def __bool__(self) -> bool:
        return bool(self.died or self.raised or self.mismatch)


@dataclass(frozen=True)
class Restart:
    """Renew the group and start the function again from the last committed checkpoint."""

    reason: str


@dataclass(frozen=True)
class GiveUp:
    """End the run by raising this on the driver."""

    error: BaseException


Decision = Restart | GiveUp

SETTLE_S = 0.05
SETTLE_SUSPECT_S = 2.0


def settle_s(facts: Facts, is_suspect: Callable[[Raised], bool]) -> float:
    """How long to wait for a better explanation. A death explains everything; an exception may be its echo, and a
    broken collective nearly always is."""
    if facts.died:
        return 0.0
    if facts.raised and all(is_suspect(error) for error in facts.raised):
        return SETTLE_SUSPECT_S
    return SETTLE_S


def decide(facts: Facts, *, is_suspect: Callable[[Raised], bool], num_restarts: int, max_retries: int) -> Decision:
    """Deaths are retried, up to `max_retries` in a run (negative: always). Exceptions are the user's: never retried.

    A death outranks an exception, since the other ranks' exceptions are usually its echo; a user's own exception
    outranks unequal reports; and both outrank a broken collective.
    """
    if facts.died:
        reason = "; ".join(f"rank {died.rank} {died.reason}" for died in facts.died)
        if max_retries < 0 or num_restarts < max_retries:
            return Restart(reason)
        return GiveUp(WorkersLostError(_lost(reason, num_restarts, max_retries)))
    own = [error for error in facts.raised if not is_suspect(error)]
    if own:
        return GiveUp(as_exception(own[0], facts.raised))
    if facts.mismatch is not None:
        return GiveUp(ReportMismatchError(str(facts.mismatch)))
    return GiveUp(as_exception(facts.raised[0], facts.raised))


def _lost(reason: str, num_restarts: int, max_retries: int) -> str:
    tried = f"after {num_restarts} restart(s)" if num_restarts else "and restarts are off"
    return (
        f"Workers were lost {tried} (max_retries={max_retries}). The last time, {reason}. The logs of the ranks are in "
        "the run folder; raise max_retries if the machine is at fault rather than the function."
    )


def as_exception(error: Raised, all_raised: Sequence[Raised] = ()) -> BaseException:
    """The user's exception with its own type, naming the rank and carrying the worker's traceback."""
    exception = error.exception
    if exception is None:
        exception = TrainFunctionError(f"{error.type_name}: {error.message}")
    note = f"Raised in the training function on rank {error.rank}. Its traceback there:\n\n{error.traceback}"
    others = [f"rank {other.rank}: {other.type_name}: {other.message}" for other in all_raised if other is not error]
    if others:
        note += "\nOther ranks raised too: " + "; ".join(others)
    exception.add_note(note)
    return exception
