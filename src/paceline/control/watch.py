"""Looks after an attempt between two rounds: is a rank silent, do ranks wait for each other in vain, is there room?"""

import logging

from paceline.control.attempt import Attempt
from paceline.runs import RunFolder
from paceline.workers.base import Died
from paceline.workers.stacks import standstill, user_line

logger = logging.getLogger(__name__)

STANDSTILL_S = 60.0
"""How long all ranks may send nothing before we look whether they wait for each other in different places."""

ROOM_LOOK_S = 1.0
"""How often to ask whether there could be more workers."""


class Watch:
    """Of one attempt; `number` is its own. What it sees becomes one of the attempt's facts, and an event."""

    def __init__(
        self, attempt: Attempt, number: int, folder: RunFolder, hang_timeout_s: float | None, max_workers: float
    ):
        self._attempt, self._number, self._folder = attempt, number, folder
        self._hang_timeout_s, self._max_workers = hang_timeout_s, max_workers
        self._next_look = self._next_room_look = 0.0
        self._told: tuple[float, int] | None = None
        """Since when nothing was heard, and how many had returned, when a standstill was last looked into."""

    def look(self, now: float, listened: float) -> None:
        """`listened` is a clock that stands still while the driver does not listen to the workers."""
        if not self._attempt.facts.is_troubled:
            self._look_for_hang(listened)
            if listened >= self._next_look:
                self._next_look = listened + STANDSTILL_S / 60
                self._look_for_standstill(listened)
        if self._attempt.facts.size < self._max_workers and now >= self._next_room_look:
            self._next_room_look = now + ROOM_LOOK_S
            self._look_for_room()

    def _look_for_hang(self, now: float) -> None:
        limit_s = self._hang_timeout_s
        slowest = self._attempt.silent_rank() if limit_s is not None else None
        if limit_s is None or slowest is None:
            return
        idle_s = now - self._attempt.progress[slowest]
        if idle_s > limit_s:
            path, where = self._dump_stacks()
            reason = f"made no progress for {idle_s:.1f} s (hang_timeout_s={limit_s:g}); {where}"
            self._folder.record_event("hang", rank=slowest, idle_s=idle_s, stacks=path)
            self._attempt.facts.died.append(Died(slowest, reason))

    def _dump_stacks(self) -> tuple[str | None, str]:
        """Returns the file, and a sentence about it."""
        path = self._folder.logs_dir / f"stacks_{self._number}.txt"
        texts = [f"=== rank {rank} ===\n{text}" for rank, text in sorted(self._attempt.group.stacks().items())]
        try:
            path.write_text("\n".join(texts), "utf-8")
        except OSError as error:  # a full disk must not change what a hang is
            return None, f"stacks of all ranks could not be written to {path} ({error.strerror})"
        return str(path), f"stacks of all ranks are in {path}"

    def _look_for_standstill(self, now: float) -> None:
        """Ranks that wait for each other in different lines do so until the collective's own timeout, half an hour by
        default: say so much sooner."""
        facts, still = self._attempt.facts, self._attempt.still_since()
        if still is None or now - still < STANDSTILL_S or self._told == (still, len(facts.values)):
            return
        self._told = (still, len(facts.values))
        lines = {rank: user_line(text) for rank, text in self._attempt.group.stacks().items()}
        sentence = standstill(sorted(facts.values), lines)
        if sentence is not None:
            self._folder.record_event("standstill", idle_s=now - still, where=sentence)
            logger.warning("%s: no rank has sent anything for %.0f s: %s.", self._folder.name, now - still, sentence)

    def _look_for_room(self) -> None:
        facts = self._attempt.facts
        had_room, facts.has_room = facts.has_room, self._attempt.group.can_grow()
        if facts.has_room and not had_room:
            self._folder.record_event("room", world_size=facts.size)
