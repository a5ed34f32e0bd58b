"""Runs that were removed, and can be had back: `.trash` below the root, in which listings do not look.

.trash/2026-05-01_12-30-00/            one removal
  removed.json                         which run it was, and when
  run                                  its folder
  deleting                             the same, while it is deleted for good: it cannot be had back any more
"""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ArgumentError, RunDamagedError, RunNotFoundError
from paceline.folder_removal import remove_folder
from paceline.json_text import encode_document
from paceline.runs.durable import read_json, write_atomic
from paceline.runs.logdir import run_number

TRASH = ".trash"
_FOLDER, _ABOUT, _DELETING = "run", "removed.json", "deleting"
_LEFT_BEHIND_S = 3600.0


@dataclass(frozen=True)
class Removed:
    name: str
    time: float
    place: Path
    """What holds it in the trash."""

    @property
    def run_dir(self) -> Path:
        return self.place / _FOLDER


def remove(root: Path, name: str, clock: Callable[[], float] = time.time) -> Removed:
    """By a rename: it is quick, and whoever has a file of it open goes on. `name` is that of a listing.
    RunNotFoundError if somebody else was quicker."""
    now = clock()
    trash = _trash(root)
    trash.mkdir(exist_ok=True)
    stem = time.strftime("%Y-%m-%d_%H-%M-%S", time.localtime(now))
    place = _make_first_free(trash, stem)
    try:
        write_atomic(place / _ABOUT, encode_document({"name": name, "time": now}))
        os.rename(root / name, place / _FOLDER)
    except BaseException as error:
        remove_folder(place)
        if isinstance(error, FileNotFoundError) and not os.path.lexists(root / name):
            raise RunNotFoundError(f"{name} is no longer there.") from None
        raise
    return Removed(name, now, place)


def removed_runs(root: Path) -> list[Removed]:
    """Newest first. What somebody has put there and does not name a place below the root is left out."""
    try:
        places = sorted(path for path in _trash(root).iterdir() if path.is_dir() and not path.is_symlink())
    except (OSError, RunDamagedError):
        return []
    found = []
    for place in places:
        try:
            about = read_json(place / _ABOUT) or {}
        except RunDamagedError:
            continue
        name, when = about.get("name"), about.get("time")
        if isinstance(name, str) and _is_below(name) and isinstance(when, int | float) and (place / _FOLDER).is_dir():
            found.append(Removed(name, float(when), place))
    return sorted(found, key=lambda one: one.time, reverse=True)


def restore(root: Path, removed: Removed) -> str:
    """The name that it has then: the former one, or the next number if a new run has that."""
    target = root / removed.name
    inside = Path(root)
    for part in Path(removed.name).parts[:-1]:
        inside = inside / part
        if inside.is_symlink():
            raise ArgumentError(f"{removed.name} cannot be restored: {inside} is a link now.")
    target.parent.mkdir(parents=True, exist_ok=True)
    while os.path.lexists(target):
        number = run_number(target.name)
        if number is None:
            raise ArgumentError(f"{removed.name} cannot be restored: there is another run of that name.")
        target = target.with_name(f"run_{number + 1:03d}")
    try:
        os.rename(removed.place / _FOLDER, target)
    except FileNotFoundError:
        raise RunNotFoundError(f"{removed.name} is no longer in the trash.") from None
    remove_folder(removed.place)
    return str(target.relative_to(root))


def empty(removed: Removed) -> bool:
    """For good, and behind no link. False if somebody else has deleted it, or brought it back."""
    try:
        os.rename(removed.place / _FOLDER, removed.place / _DELETING)  # so that half of it is never brought back
    except FileNotFoundError:
        return False
    remove_folder(removed.place)
    return True


def sweep(root: Path, clock: Callable[[], float] = time.time) -> None:
    """Deletes what a removal or a deletion has left that was killed. A young one may still go on."""
    try:
        places = [path for path in _trash(root).iterdir() if path.is_dir() and not path.is_symlink()]
    except (OSError, RunDamagedError):
        return
    for place in places:
        with suppress(OSError):
            if not os.path.lexists(place / _FOLDER) and clock() - place.stat().st_mtime > _LEFT_BEHIND_S:
                remove_folder(place)


def _trash(root: Path) -> Path:
    path = root / TRASH
    if path.is_symlink():
        raise RunDamagedError(f"{path} is a link: expected a folder. Remove it first.")
    return path


def _is_below(name: str) -> bool:
    parts = name.split("/")
    return bool(name) and "\0" not in name and all(part and not part.startswith(".") for part in parts)


def _make_first_free(trash: Path, stem: str) -> Path:
    number = 1
    while True:
        place = trash / (stem if number == 1 else f"{stem}_{number}")
        try:
            place.mkdir()
            return place
        except FileExistsError:
            number += 1
