"""One attempt at a run: a call of the function on all ranks, from its submission to its end."""

from dataclasses import dataclass, field
from typing import Any

from paceline.control.failure import Facts
from paceline.control.gather import Gather
from paceline.workers.base import Asked, WorkerGroup


@dataclass
class Attempt:
    """What is known about it so far. The controller decides what that means."""

    group: WorkerGroup
    gather: Gather
    progress: list[float]
    """When each rank last sent something."""
    values: dict[int, Any] = field(default_factory=dict)
    facts: Facts = field(default_factory=Facts)
    trouble_at: float | None = None
    deadline: float | None = None
    """When the grace period ends of a worker that will be taken away."""
    next_look: float = 0.0
    has_room: bool = False
    grows: bool = False
    turns: list[Asked] = field(default_factory=list)
    """Ranks that wait, after a report, until somebody wants the next step."""
    wanted: int = 0
    """The last step after which the next one was asked for."""

    @property
    def size(self) -> int:
        return len(self.progress)

    @property
    def num_ended(self) -> int:
        return len(self.values) + len(self.facts.raised) + len(self.facts.died)

    def silent_rank(self) -> int | None:
        """The rank that has not been heard of for longest, of those from whom something is expected."""
        excused = {*self.values, *(turn.rank for turn in self.turns)}
        waiting = [rank for rank in range(self.size) if rank not in excused]
        return min(waiting, key=self.progress.__getitem__, default=None)

    def grant_turns(self, now: float) -> None:
        """Whoever waits after a step that was handed out may go on once the next one is asked for."""
        granted = [turn for turn in self.turns if turn.value <= self.wanted]
        self.turns = [turn for turn in self.turns if turn.value > self.wanted]
        for turn in granted:
            self.progress[turn.rank] = now  # nobody expected anything of it while it waited
            self.group.answer(turn, None)
