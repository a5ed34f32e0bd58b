"""One attempt at a run, a call of the function on all ranks: what is known of it, and in which phase it is. Pure.

    phase       what happens                                                        next
    RUNNING     a worker, or this process, will be taken away; somebody wants an    LEAVING
                end: all ranks are asked to save and return
    RUNNING     there is room for more workers, and nothing is lost by going on     OVER
                with them: a checkpoint was just committed
    LEAVING     the time that they have for it is over (also when TROUBLED)         OVER
    (both)      a rank died or raised, or the ranks do something unequally often    TROUBLED
    TROUBLED    nothing that explains it better is to be expected any more          OVER
    (all)       every rank has ended                                                OVER

What an attempt that is OVER means for the run is `outcome.conclude`'s to say.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Literal

from paceline.control.notes import Notes
from paceline.recording.gather import Mismatch
from paceline.recording.ledger import SaveMismatch
from paceline.workers.base import Asked, Died, Raised, WorkerGroup

AGREE_S = 0.5
"""How long a rank that could stop waits for the others to ask too, before it goes on to where they are."""

SETTLE_S = 0.05
SETTLE_SUSPECT_S = 2.0


@dataclass(frozen=True)
class Wish:
    """What somebody wants of the run: that the function returns soon (`stop`), or, within a certain time, that this
    process ends (`terminate`) or is free for who sits at the keyboard (`interrupt`)."""

    kind: Literal["stop", "terminate", "interrupt"]
    at: float


@dataclass
class Facts:
    """What has happened in one attempt, in order of arrival. Only the controller adds to it."""

    size: int
    died: list[Died] = field(default_factory=list)
    raised: list[Raised] = field(default_factory=list)
    mismatch: Mismatch | SaveMismatch | None = None
    preempted: dict[int, str] = field(default_factory=dict)
    """Ranks that will be taken away, and why. By itself this is no failure yet."""
    preempted_at: float | None = None
    leaving: set[int] = field(default_factory=set)
    """Ranks on which `should_stop()` has been true: they may return before they have done all."""
    values: dict[int, Any] = field(default_factory=dict)
    """What the function returned, by rank."""
    has_room: bool = False
    grows: bool = False

    @property
    def is_troubled(self) -> bool:
        return bool(self.died or self.raised or self.mismatch)

    @property
    def is_done(self) -> bool:
        """Whether every rank has returned, and none because it was asked to."""
        return len(self.values) == self.size and not self.leaving

    @property
    def num_ended(self) -> int:
        return len(self.values) + len(self.raised) + len(self.died)

    def has_ended(self, rank: int) -> bool:
        return rank in self.values or any(error.rank == rank for error in self.raised)


class Phase(Enum):
    RUNNING = "running"
    LEAVING = "leaving"
    TROUBLED = "troubled"
    OVER = "over"


@dataclass(frozen=True)
class State:
    phase: Phase = Phase.RUNNING
    trouble_at: float = math.inf
    deadline: float = math.inf
    """When the time is over that the function has to save and return."""


def advance(
    state: State, facts: Facts, wish: Wish | None, now: float, *, grace_s: float, is_suspect: Callable[[Raised], bool]
) -> State:
    """The state that follows from the facts; see the table above."""
    deadline = min(
        wish.at + grace_s if wish is not None and wish.kind != "stop" else math.inf,
        facts.preempted_at + grace_s if facts.preempted_at is not None else math.inf,
    )
    is_leaving = wish is not None or facts.preempted_at is not None
    if facts.is_troubled:
        state = replace(state, phase=Phase.TROUBLED, trouble_at=min(state.trouble_at, now), deadline=deadline)
    elif is_leaving:
        state = replace(state, phase=Phase.LEAVING, deadline=deadline)
    is_settled = now - state.trouble_at >= settle_s(facts, is_suspect)
    grows = facts.grows and not facts.num_ended and not is_leaving
    if facts.num_ended >= facts.size or is_settled or now >= state.deadline or grows:
        return replace(state, phase=Phase.OVER)
    return state


def settle_s(facts: Facts, is_suspect: Callable[[Raised], bool]) -> float:
    """How long to wait for a better explanation. A death explains everything; an exception may be its echo, and a
    broken collective nearly always is. That ranks do something unequally often may come of an exception on its way."""
    if facts.died:
        return 0.0
    if all(is_suspect(error) for error in facts.raised):
        return SETTLE_SUSPECT_S
    return SETTLE_S


@dataclass
class StopAgreement:
    """At which call of `should_stop()` it becomes true, the same on all ranks: then they leave their loops together,
    none waits for another in a collective, and what they save is of one step.

    A rank asks at its next call, and waits. When all have asked, it is the furthest of these calls. One that has passed
    its call already may not ask before the others have gone on: then these are told to, and ask again. Who has not
    asked after `patience_s`, and by the third time, does not look at it at all.
    """

    patience_s: float = 0.0
    first_at: float = math.inf
    waiting: dict[int, Asked] = field(default_factory=dict)
    since: float = math.inf
    num_rounds: int = 0
    decided: int | None = None

    def take(self, rank: int, question: Asked, now: float) -> None:
        self.waiting[rank] = question
        self.since, self.first_at = min(self.since, now), min(self.first_at, now)

    def settle(self, running: set[int], now: float) -> list[tuple[Asked, int | None]]:
        """The questions that can be answered now, and with which call; None means to ask again at the next."""
        if not self.waiting:
            return []
        if self.decided is None:
            is_late = now - self.since >= AGREE_S
            self.num_rounds += is_late
            is_over = self.num_rounds >= 3 and now - self.first_at >= self.patience_s
            if running <= self.waiting.keys() or is_over:
                self.decided = max(question.value for question in self.waiting.values())
            elif not is_late:
                return []
        answered, self.waiting, self.since = list(self.waiting.values()), {}, math.inf
        return [(question, self.decided) for question in answered]


@dataclass
class Attempt:
    """The attempt as the controller goes about it."""

    group: WorkerGroup
    facts: Facts
    progress: list[float]
    """When each rank last sent something."""
    state: State = field(default_factory=State)
    turns: list[Asked] = field(default_factory=list)
    """Ranks that wait, after a report, until somebody wants the next step."""
    wanted: int = 0
    """The last step after which the next one was asked for."""
    stops: StopAgreement = field(default_factory=StopAgreement)
    notes: Notes = field(default_factory=Notes)
    searches: list[Asked] = field(default_factory=list)
    """Ranks that wait for a checkpoint which rank 0 has still to save."""

    def silent_rank(self) -> int | None:
        """The rank that has not been heard of for longest, of those from whom something is expected."""
        return min(self._expected(), key=self.progress.__getitem__, default=None)

    def still_since(self) -> float | None:
        """When the last rank was heard of from which something is expected; None if there is no such rank."""
        return max((self.progress[rank] for rank in self._expected()), default=None)

    def running(self) -> set[int]:
        ended = {*(error.rank for error in self.facts.raised), *(died.rank for died in self.facts.died)}
        return set(range(self.facts.size)) - self.facts.values.keys() - ended

    def _expected(self) -> list[int]:
        excused = {*self.facts.values, *(turn.rank for turn in self.turns), *(one.rank for one in self.searches)}
        return [rank for rank in range(self.facts.size) if rank not in excused]

    def grant_turns(self, now: float) -> None:
        """Whoever waits after a step that was handed out may go on once the next one is asked for."""
        granted = [turn for turn in self.turns if turn.value <= self.wanted]
        self.turns = [turn for turn in self.turns if turn.value > self.wanted]
        for turn in granted:
            self.progress[turn.rank] = now  # nobody expected anything of it while it waited
            self.group.answer(turn, None)
