"""A user's own directory as part of a checkpoint, copied at once: the user may delete it right after."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from paceline.checkpoints.content.files import DiskFile
from paceline.checkpoints.storage.workspace import Workspace
from paceline.errors import ArgumentError


class StagedDirectory:
    """The copy, which lives until `close`."""

    def __init__(self, files: list[DiskFile], workspace: Workspace):
        self.files = files
        self._workspace = workspace

    def close(self) -> None:
        self._workspace.close()

    def __enter__(self) -> "StagedDirectory":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check(directory: str | Path) -> Path:
    """Raises ArgumentError for anything but a directory with files in it."""
    path = Path(directory).expanduser()
    if not path.is_dir():
        what = "is not a directory" if path.exists() else "does not exist"
        raise ArgumentError(
            f"save_checkpoint got directory={str(directory)!r}, which {what}: give one with files in it."
        )
    if next(_walk(path, "", ()), None) is None:
        raise ArgumentError(
            f"save_checkpoint got directory={str(directory)!r}, which holds no files: write them first."
        )
    return path


def files_of(directory: str | Path) -> Iterator[tuple[str, Path]]:
    """(name, path) of every file below a directory, links followed."""
    return _walk(Path(directory), "", ())


def stage(directory: str | Path, make_workspace: Callable[[], Workspace], prefix: str) -> StagedDirectory:
    """Copies every file below `directory`. Links are followed, so that the copy stands alone; empty folders
    are left out,
    as object stores have none."""
    source = check(directory)
    workspace = make_workspace()
    try:
        files = []
        for name, path in _walk(source, prefix, ()):
            target = workspace.path / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
            files.append(DiskFile(name, target))
    except BaseException:
        workspace.close()
        raise
    return StagedDirectory(files, workspace)


def _walk(folder: Path, prefix: str, above: tuple[str, ...]) -> Iterator[tuple[str, Path]]:
    """(name, path) of every file. `above` are the real paths of the folders on the way here, to notice a loop
    of links.
    """
    real = os.path.realpath(folder)
    if real in above:
        raise ArgumentError(f"{folder} is a link to a directory that contains it: save_checkpoint cannot copy a loop.")
    for entry in sorted(folder.iterdir()):
        name = f"{prefix}/{entry.name}" if prefix else entry.name
        if entry.is_dir():
            yield from _walk(entry, name, (*above, real))
        elif entry.is_file():
            yield name, entry
        else:
            raise ArgumentError(f"{entry} is neither a file nor a directory: save_checkpoint cannot copy it.")
