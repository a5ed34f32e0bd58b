"""Marks: what a process saw, with the time. All processes of a measurement append them to one file.

The times are comparable between processes: on Linux the monotonic clock is that of the system.
"""

import json
import os
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

MARKS_FILE = "PACELINE_BENCH_MARKS"
"""The environment variable that names the file."""

Mark = dict[str, Any]


def mark(name: str, **fields: Any) -> None:
    line = json.dumps({"name": name, "at": time.monotonic(), **fields}) + "\n"
    fd = os.open(os.environ[MARKS_FILE], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(fd, line.encode())
    finally:
        os.close(fd)


def read_marks(path: Path) -> list[Mark]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def launches(marks: list[Mark]) -> Iterator[list[Mark]]:
    """The marks of each launch: its own "launch" mark first, then what followed until the next."""
    starts = [index for index, one in enumerate(marks) if one["name"] == "launch"]
    for start, end in pairwise([*starts, len(marks)]):
        yield marks[start:end]


def the(name: str, marks: list[Mark], num_expected: int) -> list[Mark]:
    """The marks of that name. Fewer than every rank should have made means that the measurement is void."""
    found = [one for one in marks if one["name"] == name]
    if len(found) != num_expected:
        raise ValueError(f"{len(found)} marks {name!r} where {num_expected} belong")
    return found
