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
    deadline = time.monotonic() + timeout_s
    return {rank: _await_text(pid, path, before[rank], deadline) for rank, (pid, path) in processes.items()}


def _await_text(pid: int, path: Path, start: int, deadline: float) -> str:
    size = start
    while time.monotonic() < deadline:
        time.sleep(_POLL_S)
        previous, size = size, _size(path)
        if size > start and size == previous:
            with path.open("rb") as file:
                file.seek(start)
                return file.read().decode(errors="replace")
    return f"(pid {pid} gave no answer: it is stopped, ended or stuck in the kernel)\n"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
