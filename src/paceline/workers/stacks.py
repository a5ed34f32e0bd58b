"""Ask processes for their Python stacks by signal. faulthandler answers in C, also when the GIL is held."""

import contextlib
import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_POLL_S = 0.01
_FRAME = re.compile(r'File "(.+)", line (\d+) in ')


def collect_stacks(processes: Mapping[int, tuple[int, Path]], timeout_s: float) -> dict[int, str]:
    """Stacks by rank, given each rank's pid and the file to which its faulthandler writes on SIGUSR1."""
    before = {rank: _size(path) for rank, (_, path) in processes.items()}
    for pid, _ in processes.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    _wait_for_answers({path: before[rank] for rank, (_, path) in processes.items()}, timeout_s)
    return {rank: _text(pid, path, before[rank]) for rank, (pid, path) in processes.items()}


def user_line(text: str) -> str | None:
    """Where the function is, by the stacks of its rank: the innermost line that is neither a library's nor ours."""
    for thread in re.split(r"^(?=Current thread|Thread)", text, flags=re.MULTILINE):
        frames = _FRAME.findall(thread)
        session = next((path for path, _ in frames if path.endswith("paceline/session.py")), None)
        if session is None:
            continue
        ours = (os.path.dirname(session), os.path.dirname(os.__file__), "<frozen")
        for path, line in frames:
            if not path.startswith(ours) and "site-packages" not in path:
                return f"{os.path.basename(path)} line {line}"
    return None


def without_stacks(stacks: Mapping[int, str]) -> list[int]:
    """Ranks that gave none: they are stopped, or stuck where nothing reaches them. Who only waits for another, as in a
    collective, has some. What an engine says in place of stacks is in brackets."""
    return sorted(rank for rank, text in stacks.items() if text.startswith("("))


def standstill(returned: Sequence[int], lines: Mapping[int, str | None]) -> str | None:
    """Who is where, if ranks that send nothing may wait for each other in vain; None if all are in the same line."""
    places: dict[str, list[int]] = {}
    for rank, line in sorted(lines.items()):
        place = "returned" if rank in returned else f"in {line or 'a place that is not known'}"
        places.setdefault(place, []).append(rank)
    if len(places) < 2:
        return None
    return ", ".join(f"{rank_names(ranks)} {_is_in(place, len(ranks))}" for place, ranks in places.items())


def rank_names(ranks: Sequence[int]) -> str:
    """For a sentence: "rank 3", or "ranks 1, 2"; the first of many."""
    shown = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _is_in(place: str, count: int) -> str:
    if place == "returned":
        return "has returned" if count == 1 else "have returned"
    return f"{'is' if count == 1 else 'are'} still {place}"


def _wait_for_answers(before: Mapping[Path, int], timeout_s: float) -> None:
    """Until every file has grown and then rested; a process that is stopped never answers."""
    sizes = dict(before)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        time.sleep(_POLL_S)
        previous, sizes = sizes, {path: _size(path) for path in before}
        if sizes == previous and all(sizes[path] > before[path] for path in before):
            return


def _text(pid: int, path: Path, start: int) -> str:
    if _size(path) == start:
        return f"(pid {pid} gave no answer: it is just starting, stopped, ended or stuck in the kernel)\n"
    with path.open("rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
