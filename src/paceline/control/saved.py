"""What a run has saved so far, and so where its next attempt begins."""

from dataclasses import dataclass
from typing import Any

from paceline.checkpoints import CheckpointInfo, CheckpointStore
from paceline.control.plan import Plan


@dataclass(frozen=True)
class ResumePoint:
    """`checkpoint` is what `load_checkpoint()` returns at first, saved when `iteration` steps had been made."""

    checkpoint: str | dict[str, Any] | None
    iteration: int
    next_id: int

    @property
    def name(self) -> str | None:
        is_dict = self.checkpoint is not None and not isinstance(self.checkpoint, str)
        return "a dict given to run()" if is_dict else self.checkpoint  # type: ignore[return-value]


class Saved:
    """The checkpoints of one run, as its driver knows them."""

    def __init__(self, plan: Plan):
        self._plan = plan
        self.latest: CheckpointInfo | None = None
        self.kept: tuple[dict[str, Any], int] | None = None
        """With num_to_keep=0: the latest state and its iteration."""
        self.num_in_progress = 0
        self._next_id = plan.first_checkpoint_id

    def is_news(self, info: CheckpointInfo) -> bool:
        """Take note of a committed checkpoint; False when it was known already."""
        if self.latest is not None and info.id <= self.latest.id:
            return False
        self.latest = info
        return True

    def look(self) -> list[CheckpointInfo]:
        """Those on storage that we have not been told of: a worker may have died between its commit and telling us, or
        an earlier driver has known them. Oldest first."""
        if self._plan.strategy.num_to_keep == 0:
            return []
        store = CheckpointStore(self._plan.checkpoint_root)
        self._next_id = store.next_id()
        return [info for info in store.list() if info.id >= self._plan.first_checkpoint_id and self.is_news(info)]

    def resume_point(self) -> ResumePoint:
        if self.kept is not None:
            return ResumePoint(self.kept[0], self.kept[1], 1)
        if self.latest is not None:
            return ResumePoint(self.latest.path, self.latest.iteration, self._next_id)
        return ResumePoint(self._plan.checkpoint, self._plan.first_iteration, self._next_id)
