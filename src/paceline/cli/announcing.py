"""Which run this is, as a line of its program's output: for who looks on, here or in the log of a job."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from paceline.callbacks.base import Callback
from paceline.cli import streams

_LINE = re.compile(r"^paceline: This is (\S.*)/(run_\d{3,}), in (/.*)$", re.MULTILINE)


class Announced(NamedTuple):
    name: str
    run: str
    path: str
    """As the program sees it."""


class Announcement(Callback):
    """Says it when the folder is there and workers are about to begin."""

    def __init__(self, say: Callable[[str], None] | None = None):
        self.path: Path | None = None
        self._say = say or _say

    def start_training(self, logdir: str, config: dict[str, Any], **info: Any) -> None:
        self.path = Path(logdir)
        self._say(f"paceline: This is {self.path.parent.name}/{self.path.name}, in {self.path}")


def _say(line: str) -> None:
    """As it is: who looks on reads the path out of it. Whether somebody does is nothing to the run."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        streams.mute()


def find_announced(text: str) -> Announced | None:
    """The first run that is announced in what a program has printed."""
    found = _LINE.search(text)
    return None if found is None else Announced(found[1], found[2], found[3])
