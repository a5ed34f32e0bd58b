"""The collectives of all ranks, as rank 0 sees them: who is in which, and what each gets. Pure.

A collective is over when all members of its scope are in it, with the same number and the same name. Who waits in one
that can no longer be, because members are gone, elsewhere or too late, gets an error that names them.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.errors import PacelineError, WorkerError, WorkersLostError


@dataclass(frozen=True)
class Entry:
    serial: int
    op: str
    payload: bytes
    deadline: float


@dataclass(frozen=True)
class Answer:
    """What a rank gets that waits in this collective; an error is raised there."""

    rank: int
    scope: str
    serial: int
    value: Any


class Exchange:
    """`scopes` are the members of each, the source of its broadcasts first."""

    def __init__(self, scopes: Mapping[str, tuple[int, ...]], timeout_s: float = math.inf):
        self._scopes, self._timeout_s = scopes, timeout_s
        self._size = len({rank for members in scopes.values() for rank in members})
        self._waiting: dict[str, dict[int, Entry]] = {scope: {} for scope in scopes}
        self._gone: dict[int, str] = {}
        self._error: PacelineError | None = None

    def enter(self, rank: int, scope: str, serial: int, op: str, payload: bytes, now: float) -> list[Answer]:
        """A rank waits for the others. Returns what can be answered now."""
        if self._error is not None:
            return [Answer(rank, scope, serial, self._error)]
        inside = self._waiting[scope]
        inside[rank] = Entry(serial, op, payload, now + self._timeout_s)
        members = self._scopes[scope]
        if any(member in self._gone for member in members):
            return self._refuse_gone(scope)
        if len(inside) < len(members):
            is_stuck = sum(map(len, self._waiting.values())) + len(self._gone) >= self._size
            return self._refuse_all() if is_stuck else []
        if len({(entry.serial, entry.op) for entry in inside.values()}) > 1:
            return self._refuse_all()
        self._waiting[scope] = {}
        return [
            Answer(member, scope, serial, _value(op, member == members[0], [inside[one].payload for one in members]))
            for member in members
        ]

    def lose(self, rank: int, reason: str) -> list[Answer]:
        """The rank will be in no collective any more."""
        self._gone.setdefault(rank, reason)
        for entries in self._waiting.values():
            entries.pop(rank, None)
        return [
            answer for scope, members in self._scopes.items() if rank in members for answer in self._refuse_gone(scope)
        ]

    def fail(self, error: PacelineError) -> list[Answer]:
        """Nothing more comes about, for this reason."""
        self._error = error
        return [answer for scope in self._scopes for answer in self._refuse(scope, error)]

    def overdue(self, now: float) -> list[Answer]:
        return [
            answer
            for scope, entries in self._waiting.items()
            if entries and now >= min(entry.deadline for entry in entries.values())
            for answer in self._refuse(scope, self._too_late(scope))
        ]

    def _too_late(self, scope: str) -> WorkerError:
        entries = self._waiting[scope]
        [op, *_] = {entry.op for entry in entries.values()}
        late = ", ".join(str(member) for member in self._scopes[scope] if member not in entries)
        return WorkerError(
            f"{op}(): rank {late} has not come within {self._timeout_s:g} s. All ranks have to call it; if they are "
            "only slow, raise timeout_s of the DistributedContext."
        )

    def _refuse_gone(self, scope: str) -> list[Answer]:
        gone = "; ".join(f"rank {rank} {self._gone[rank]}" for rank in self._scopes[scope] if rank in self._gone)
        return self._refuse(scope, WorkersLostError(f"The ranks cannot meet any more: {gone}."))

    def _refuse_all(self) -> list[Answer]:
        """None of those who wait will ever meet all others."""
        inside = sorted((rank, entry) for entries in self._waiting.values() for rank, entry in entries.items())
        where = ", ".join(f"rank {rank} in {entry.op}, its call {entry.serial}" for rank, entry in inside)
        error = WorkerError(
            f"The ranks are out of step: {where}. All ranks have to make the same calls of gather, allgather and "
            "broadcast, in the same order."
        )
        return [answer for scope in self._scopes for answer in self._refuse(scope, error)]

    def _refuse(self, scope: str, error: PacelineError) -> list[Answer]:
        entries, self._waiting[scope] = self._waiting[scope], {}
        return [Answer(rank, scope, entry.serial, error) for rank, entry in entries.items()]


def scopes_of(machines: Iterable[tuple[int, int, int]]) -> dict[str, tuple[int, ...]]:
    """From (rank, machine, rank on the machine) of all ranks."""
    ranks = sorted(machines)
    scopes: dict[str, tuple[int, ...]] = {"all": tuple(rank for rank, _, _ in ranks)}
    for machine in sorted({machine for _, machine, _ in ranks}):
        local = sorted((local_rank, rank) for rank, where, local_rank in ranks if where == machine)
        scopes[f"machine {machine}"] = tuple(rank for _, rank in local)
    return scopes


def _value(op: str, is_first: bool, payloads: list[bytes]) -> Any:
    if op.startswith("broadcast"):
        return payloads[0]
    return payloads if is_first or op.startswith("allgather") else None
