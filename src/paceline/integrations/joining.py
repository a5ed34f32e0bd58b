"""What the callbacks of all libraries share: whether a trainer is part of the run, what it goes on from and what ranks
its checkpoints."""

import logging
import math
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.checkpoints import Checkpoint
from paceline.checkpoints.strategy import TIMESTAMP
from paceline.errors import MissingDependencyError, TrainerStateError
from paceline.rank_session import Session

logger = logging.getLogger(__name__)

_START, _OWNER, _UNRANKED = "integrations.start", "integrations.owner", "integrations.unranked"


def begun_from(running: Session, file: str) -> Checkpoint | None:
    """The checkpoint that this attempt has begun with, if it has that file in its directory. None as soon as something
    was saved: a trainer that begins then, another one or the same again, has what was trained before it in memory, and
    to begin with the checkpoint would undo that."""
    if running.saver.has_saved:
        return None
    if _START not in running.extras:
        running.extras[_START] = running.load_checkpoint()
    start: Checkpoint | None = running.extras[_START]
    if start is None or start.directory is None or not (start.directory / file).exists():
        return None
    return start


def with_file(directory: Path, name: str, content: bytes, running: Session) -> Path:
    """The files of a checkpoint, which are not to be changed, and one more, until the function has ended."""
    folder = Path(tempfile.mkdtemp(prefix="paceline-"))
    running.cleanups.callback(shutil.rmtree, folder, ignore_errors=True)
    for file in directory.iterdir():
        if file.name != name:
            (folder / file.name).symlink_to(file.absolute())
    (folder / name).write_bytes(content)
    return folder


@contextmanager
def folder_for_files(running: Session) -> Iterator[Path]:
    """An empty one, near to where checkpoints go. Not the workspace itself: in that there is a lock, which would become
    a file of the checkpoint."""
    with running.saver.workspace() as workspace:
        folder = workspace.path / "files"
        folder.mkdir()
        yield folder


def join(running: Session, owner: Any, world_size: int, remedy: str) -> None:
    """When a trainer begins: it has to know of all ranks, and should be the only one. `world_size` is what it sees."""
    place = running.place
    if world_size != place.world_size:
        raise TrainerStateError(
            f"The trainer on rank {place.world_rank} sees {world_size} process(es), and the run has {place.world_size} "
            f"workers: {remedy}."
        )
    former = running.extras.setdefault(_OWNER, owner)
    if former is not owner and place.world_rank == 0:
        logger.warning(
            "A second trainer saves into this run: after a failure, the first one would go on from its checkpoints. "
            "Give each trainer a run of its own."
        )


def scored(running: Session, kept: dict[str, Any]) -> dict[str, Any]:
    """What a trainer keeps with a checkpoint, and the score of the run's CheckpointStrategy. The user does not choose
    when a trainer saves: before the first evaluation, or at a stop, there may be no such value yet. Then it is NaN, the
    worst, which is said once: the name may be mistyped."""
    name = running.strategy.checkpoint_score_attribute
    if name == TIMESTAMP or name in kept:
        return kept
    if running.place.world_rank == 0 and _UNRANKED not in running.extras:
        running.extras[_UNRANKED] = True
        logger.warning(
            "Checkpoints are ranked by %r, which has not been logged yet: those without it count as the worst. There "
            "is: %s.",
            name,
            ", ".join(kept),
        )
    return {**kept, name: math.nan}


def missing(error: ModuleNotFoundError, needed_for: str) -> MissingDependencyError:
    """What to raise in a module whose library, or what that needs, is not installed."""
    return MissingDependencyError((error.name or "").partition(".")[0], "integrations", needed_for)
