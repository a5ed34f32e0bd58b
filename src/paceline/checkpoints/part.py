"""One rank's contribution to a checkpoint, and what the driver tells a rank that wants to read it back."""

from dataclasses import dataclass

from paceline.checkpoints.content.files import FileRecord
from paceline.checkpoints.content.snapshot import rank_dir
from paceline.checkpoints.storage.base import Draft


@dataclass(frozen=True)
class Part:
    """The n-th save of one rank, durable in the draft of the checkpoint `id`. `iteration` is the number of reports that
    the rank had made before it, `num_collectives` that of the collectives of the whole group, if it is known. The score
    is that of rank 0, whose part is the shared state."""

    id: int
    rank: int
    iteration: int
    time: float
    files: tuple[FileRecord, ...] = ()
    score: float | None = None
    num_collectives: int | None = None
    is_alone: bool = False
    """Whether it is the whole checkpoint: rank 0 has saved it without the others."""

    @property
    def has_own(self) -> bool:
        """Whether there is something in it that no other rank's part can stand for."""
        return any(self.rank or record.name.startswith(rank_dir(self.rank)) for record in self.files)


@dataclass(frozen=True)
class DraftFound:
    """What a rank saved is in this draft, of which these files were told to the driver."""

    draft: Draft
    files: tuple[FileRecord, ...]
    world_size: int


@dataclass(frozen=True)
class CommittedFound:
    """What a rank saved, or something newer, is at this path; or something older, if that could not be saved."""

    path: str
    problem: str | None = None
    """Why what was asked for is not there."""


Found = DraftFound | CommittedFound
