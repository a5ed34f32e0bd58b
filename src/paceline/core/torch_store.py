"""What torch.distributed knows of the ranks: where this one stands, and a store in which they find notes of others."""

import atexit
import os
import socket
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from paceline.errors import ArgumentError, MissingDependencyError, TrainerStateError
from paceline.workers.base import Place, place_from_environ


def group_place() -> Place | None:
    """By the process group; None without one."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return None
    rank, size = dist.get_rank(), dist.get_world_size()
    told = place_from_environ(os.environ)
    if told is not None and (told.world_rank, told.world_size) == (rank, size):
        return told
    return _place_by_host(rank, size)


class MeetingStore:
    """One note of rank 0's."""

    def __init__(self, store: Any, rank: int, timeout_s: float):
        self._store, self._timeout_s = store, timeout_s
        self._key = f"paceline/meeting/{_visit(store, rank)}"

    def put(self, text: str) -> None:
        self._store.set(self._key, text)

    def get(self) -> str:
        try:
            self._store.wait([self._key], timedelta(seconds=self._timeout_s))
        except RuntimeError as error:  # DistStoreError, or a plain one
            raise TimeoutError(
                f"Rank 0 has not come to where all ranks meet within {self._timeout_s:g} s ({error}). All ranks have "
                "to call core.init(), or record_run(), equally often."
            ) from error
        text: str = self._store.get(self._key).decode()
        return text


def meeting_store(rank: int, timeout_s: float) -> MeetingStore:
    if "torch.distributed" not in sys.modules:  # before seconds are spent on it
        _check_told()
    try:
        import torch.distributed as dist
    except ImportError as error:
        raise MissingDependencyError(
            "torch", "torch", "A run of several processes that find each other by it"
        ) from error
    atexit.unregister(_let_threads_finish)
    atexit.register(_let_threads_finish)
    if dist.is_initialized():
        return MeetingStore(dist.distributed_c10d._get_default_store(), rank, timeout_s)
    return MeetingStore(_launchers_store(timeout_s), rank, timeout_s)


def _launchers_store(timeout_s: float) -> Any:
    """That of torchrun's agent; or one that rank 0 makes at MASTER_PORT, which a process group can share later."""
    import torch.distributed as dist

    place = _check_told()
    global _launched
    if _launched is None:
        # RANK may be srun's, under another name
        arguments: dict[str, Any] = {"rank": place.world_rank, "world_size": place.world_size}
        rendezvous: Any = dist.rendezvous  # type: ignore[attr-defined]
        _launched, _, _ = next(rendezvous("env://", **arguments, timeout=timedelta(seconds=timeout_s)))
    return _launched


def _check_told() -> Place:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    place = place_from_environ(os.environ)
    if place is None or missing:
        raise ArgumentError(
            f"The ranks cannot find each other: {' and '.join(missing or ['RANK', 'WORLD_SIZE'])} not set, and there "
            "is no process group. Start the script with torchrun, or call torch.distributed.init_process_group(...) "
            "before, or give core.init(distributed=core.DistributedContext(...)). For a single process, unset RANK and "
            "WORLD_SIZE."
        )
    return place


_launched: Any = None
"""Kept until the process ends: rank 0's is the one that all others are connected to."""


def _visit(store: Any, rank: int) -> int:
    """How often this rank has come here. All ranks come equally often, and so the n-th visits of all are one meeting: a
    note of an earlier one may still be there. Counted in the store: a rank may be a new process, in a new group."""
    return int(store.add(f"paceline/visits/{rank}", 1))


def _place_by_host(rank: int, size: int) -> Place:
    """In a group whose launcher has not told which ranks share a machine."""
    import torch.distributed as dist

    store: Any = dist.distributed_c10d._get_default_store()
    store = dist.PrefixStore(f"paceline/hosts/{_visit(store, rank)}", store)  # type: ignore[attr-defined]
    store.set(str(rank), socket.gethostname())
    try:
        hosts = [store.get(str(other)).decode() for other in range(size)]
    except RuntimeError as error:
        raise TrainerStateError(f"Not all ranks of the process group have come: {error}") from error
    mine = [other for other in range(size) if hosts[other] == hosts[rank]]
    machines = list(dict.fromkeys(hosts))
    return Place(rank, mine.index(rank), machines.index(hosts[rank]), size, len(mine))


def _let_threads_finish() -> None:
    """Those of gloo, which torch leaves running when DDP was used, before the interpreter ends. One that has done its
    work but not yet let go of a tensor needs the interpreter's lock for that, and if it comes too late, it ends the
    process by SIGABRT, after all had gone well. They have no name in Python, so we look whether they still do anything
    while the lock is free."""
    deadline, before = time.monotonic() + _FINISH_S, None
    while (now := _gloo_threads()) != before or any(state != "S" for state, _ in now):
        if time.monotonic() > deadline:
            return
        before = now
        time.sleep(0.001)


_FINISH_S = 5.0


def _gloo_threads() -> list[tuple[str, str]]:
    """Of each, whether it sleeps, and how often it has begun to."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has just ended
            status = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines() if ":\t" in line)
            if status["Name"] == "pt_gloo_runloop":
                found.append((status["State"][0], status["voluntary_ctxt_switches"]))
    return found
