"""Ask processes for their Python stacks by signal. faulthandler answers in C, also when the GIL is held."""

import contextlib
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

_POLL_S = 0.01


def collect_stacks(processes: Mapping[int, tuple[int, Path]], timeout_s: float) -> dict[int, str]:
    """Stacks by rank, given each rank's pid and the file to which its faulthandler writes on SIGUSR1."""
    before = {rank: _size(path) for rank, (_, path) in processes.items()}
    for pid, _ in processes.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    _wait_for_answers({path: before[rank] for rank, (_, path) in processes.items()}, timeout_s)
    return {rank: _text(pid, path, before[rank]) for rank, (pid, path) in processes.items()}


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
