"""What became of a run: its states, the file that says so, and how a lost run is told from a living one."""

import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from paceline.json_text import encode_document
from paceline.runs.durable import write_atomic

logger = logging.getLogger(__name__)

LOST_AFTER_S = 30.0


class RunState(StrEnum):
    """Members compare equal to their names: `status.state == "RUNNING"`."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    STOPPED = "STOPPED"
    LOST = "LOST"

    @property
    def is_final(self) -> bool:
        return self not in (RunState.PENDING, RunState.RUNNING)


@dataclass(frozen=True)
class RunStatus:
    """One reading of status.json. Times are seconds since the epoch; `pid` is the driver's, on `machine`."""

    state: RunState
    reason: str | None = None
    heartbeat: float | None = None
    pid: int | None = None
    host: str | None = None
    worker_pids: tuple[int, ...] = ()
    created: float | None = None
    started: float | None = None
    ended: float | None = None
    machine: str | None = None
    pid_started: int | None = None
    progress: float | None = None
    """How much is done, from 0 to 1, if the function says so."""

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> "RunStatus | None":
        """None when `fields` is not a status: written by hand, or by a version that has other states."""
        known = {name: fields[name] for name in cls.__dataclass_fields__ if fields.get(name) is not None}
        pids = known.get("worker_pids", [])
        wrong = [name for name in known.keys() & _TYPES.keys() if type(known[name]) not in _TYPES[name]]
        if wrong or not isinstance(pids, list) or not all(type(pid) is int for pid in pids):
            return None
        try:
            return cls(**known | {"state": RunState(known["state"]), "worker_pids": tuple(pids)})
        except (KeyError, ValueError):
            return None


_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("state", "reason", "host", "machine"), (str,)),
    **dict.fromkeys(("pid", "pid_started"), (int,)),
    **dict.fromkeys(("heartbeat", "created", "started", "ended", "progress"), (float, int)),
}


Driver = Literal["here", "gone", "unknown"]


def judge(status: RunStatus, *, now: float, driver: Driver) -> RunStatus:
    """The status as a reader should see it: an unfinished run that nobody drives any more is LOST.

    A driver that is known to live may take its time to start the run, but while it is RUNNING it must beat.
    """
    if status.state.is_final:
        return status
    if driver == "gone":
        return _lost(status, f"its driver process {status.pid} ended without saying how the run ended")
    silence_s = now - status.heartbeat if status.heartbeat is not None else float("inf")
    if silence_s <= LOST_AFTER_S or (status.state is RunState.PENDING and driver == "here"):
        return status
    if status.heartbeat is None:
        return _lost(status, "it has no heartbeat")
    still = f", though process {status.pid} still exists" if driver == "here" else ""
    return _lost(status, f"its last heartbeat was {silence_s:.0f} s ago{still}")


def _lost(status: RunStatus, reason: str) -> RunStatus:
    return replace(status, state=RunState.LOST, reason=reason, ended=status.heartbeat)


def find_driver(status: RunStatus) -> Driver:
    """Looks for the driver's process, if this is the machine (and container) where it ran."""
    if status.pid is None or status.host != os.uname().nodename or status.machine not in (None, _machine()):
        return "unknown"
    started = process_started(status.pid)
    if started is None or status.pid_started not in (None, started):
        return "gone"
    return "here"


def process_started(pid: int) -> int | None:
    """When a living process started, in kernel ticks: a pid that was given out again has another value."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


@functools.cache
def _machine() -> str:
    """Tells apart machines with one host name, boots of a machine, and containers with pids of their own."""
    parts = []
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


class StatusFile:
    """Keeps status.json true while this process drives the run. Thread-safe.

    The first final state stands: neither the heartbeat nor a later `set` changes it.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time, former: RunStatus | None = None):
        """`former` is what an earlier driver of the run left: when it was created and started stays."""
        self.path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._state = RunState.PENDING
        self._fields: dict[str, Any] = {
            "state": self._state,
            "reason": None,
            "heartbeat": clock(),
            "pid": os.getpid(),
            "host": os.uname().nodename,
            "worker_pids": [],
            "created": former.created if former and former.created else clock(),
            "started": former.started if former else None,
            "ended": None,
            "machine": _machine(),
            "pid_started": process_started(os.getpid()),
        }

    @property
    def state(self) -> RunState:
        return self._state

    def set(self, state: RunState, reason: str | None, fields: Mapping[str, Any]) -> None:
        """OSError if the file could not be written; the next beat, if there is one, tries again."""
        with self._lock:
            if self._state.is_final:
                logger.debug("%s is %s and does not become %s", self.path, self._state, state)
                return
            now = self._clock()
            self._state = state
            self._fields.update(fields)
            self._fields.update(state=state, reason=reason, heartbeat=now)
            if state is RunState.RUNNING and self._fields["started"] is None:
                self._fields["started"] = now
            if state.is_final:
                self._fields["ended"] = now
                self._write_final()
            else:
                self._write()

    def note(self, **fields: Any) -> None:
        """Written with the next beat, or the final state."""
        with self._lock:
            self._fields.update(fields)

    def beat(self) -> None:
        """Raises OSError if the file could not be written: the next beat may succeed."""
        with self._lock:
            if not self._state.is_final:
                self._fields["heartbeat"] = self._clock()
                self._write()

    def _write(self) -> None:
        write_atomic(self.path, encode_document(self._fields), durable=False)

    def _write_final(self) -> None:
        data = encode_document(self._fields)
        try:
            write_atomic(self.path, data)
        except OSError:
            # A full disk has no room for a second file, but the blocks of the present one are ours. Padded,
            # so that one write replaces all of it.
            with open(self.path, "r+b", buffering=0) as file:
                file.write(data.ljust(os.fstat(file.fileno()).st_size))
                os.fsync(file.fileno())


class Heartbeat:
    """Calls `beat` every `interval_s` on a daemon thread until it returns False or `stop` is called."""

    def __init__(self, beat: Callable[[], bool], interval_s: float):
        self._beat = beat
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="paceline-heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _loop(self) -> None:
        while not self._stopped.wait(self._interval_s) and self._beat():
            pass
