"""Where this process stands among all ranks, and the few collectives that need neither tensors nor a GPU."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any, Protocol

from paceline import session
from paceline.core.meeting import ExplicitMeeting, HorovodMeeting, Meeting, SessionMeeting, TorchMeeting, connect
from paceline.errors import ArgumentError, TrainerStateError
from paceline.workers import parcel
from paceline.workers.base import Place, place_from_environ

TIMEOUT_S = 600.0
_SIX = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")


class Channel(Protocol):
    """A rank's end of the connection among all ranks: `Hub` on rank 0, `Link` on the others."""

    def exchange(self, scope: str, op: str, payload: bytes) -> Any:
        """Take part in a collective with all members of a scope. Blocks, for a bounded time."""

    def close(self) -> None:
        """Idempotent."""


class DistributedContext:
    """Ranks, and `gather`, `allgather` and `broadcast` of any values that can be pickled.

    Give all six numbers, or none for a single process. All ranks of a collective have to call it: who waits longer
    than `timeout_s`, or with others that are in another call, gets a WorkerError that names the ranks. One thread at a
    time. The connection is made when it is first needed, which all ranks have to do together; `core.init` is such a
    moment.
    """

    def __init__(
        self,
        *,
        rank: int | None = None,
        size: int | None = None,
        local_rank: int | None = None,
        local_size: int | None = None,
        cross_rank: int | None = None,
        cross_size: int | None = None,
        chief_ip: str | None = None,
        chief_port: int | None = None,
        timeout_s: float = TIMEOUT_S,
    ):
        given = dict(zip(_SIX, (rank, size, local_rank, local_size, cross_rank, cross_size), strict=True))
        _check_six(given)
        self.rank, self.size = rank or 0, size or 1
        self.local_rank, self.local_size = local_rank or 0, local_size or 1
        self.cross_rank, self.cross_size = cross_rank or 0, cross_size or 1
        self.chief_ip, self.chief_port, self.timeout_s = chief_ip, chief_port, timeout_s
        self._meeting: Meeting = ExplicitMeeting(chief_ip, chief_port)
        self._channel: Channel | None = None
        self._turn = threading.Lock()
        self._is_closed = False
        if self.size > self.local_size and chief_ip is None and chief_port is not None:
            raise ArgumentError(
                f"{self.size} ranks on several machines need chief_ip, the address at which they reach rank 0."
            )

    @classmethod
    def from_environ(cls, chief_ip: str | None = None, *, timeout_s: float = TIMEOUT_S) -> DistributedContext:
        """As the launcher says that has started this process: torchrun, srun, or whatever sets RANK and WORLD_SIZE.
        Without one, a single process."""
        place = place_from_environ(os.environ) or Place()
        return cls._at(place, TorchMeeting(chief_ip), chief_ip, timeout_s)

    @classmethod
    def from_torch_distributed(cls, chief_ip: str | None = None, *, timeout_s: float = TIMEOUT_S) -> DistributedContext:
        """As torch.distributed says: its process group if there is one, else torchrun's variables. `chief_ip` is where
        other machines reach rank 0, if that is not the address by which it reaches them."""
        from paceline.core.torch_store import group_place

        place = group_place() or place_from_environ(os.environ)
        if place is None:
            raise TrainerStateError(
                "from_torch_distributed(): there is no process group, and RANK and WORLD_SIZE are not set. Call "
                "torch.distributed.init_process_group(...) first, or start the script with torchrun."
            )
        return cls._at(place, TorchMeeting(chief_ip), chief_ip, timeout_s)

    @classmethod
    def from_horovod(cls, hvd: Any, chief_ip: str | None = None, *, timeout_s: float = TIMEOUT_S) -> DistributedContext:
        """As `hvd` says, a module such as `horovod.torch`, after `hvd.init()`."""
        place = Place(
            world_rank=hvd.rank(),
            local_rank=hvd.local_rank(),
            node_rank=hvd.cross_rank(),
            world_size=hvd.size(),
            local_world_size=hvd.local_size(),
        )
        return cls._at(place, HorovodMeeting(hvd, chief_ip), chief_ip, timeout_s, hvd.cross_size())

    @classmethod
    def here(cls, timeout_s: float = TIMEOUT_S) -> DistributedContext:
        """Whatever this process is: a Trainer's worker, one of a launcher's, of a process group, or alone."""
        running = session.current()
        if running is not None:
            return cls._at(running.place, SessionMeeting(running), None, timeout_s)
        if session.in_worker():
            return cls._at(session.place(), TorchMeeting(None), None, timeout_s)
        if place_from_environ(os.environ) is None and "torch.distributed" in sys.modules:
            from paceline.core.torch_store import group_place

            if group_place() is not None:
                return cls.from_torch_distributed(timeout_s=timeout_s)
        return cls.from_environ(timeout_s=timeout_s)

    @classmethod
    def _at(
        cls, place: Place, meeting: Meeting, chief_ip: str | None, timeout_s: float, cross_size: int | None = None
    ) -> DistributedContext:
        made = cls(
            rank=place.world_rank,
            size=place.world_size,
            local_rank=place.local_rank,
            local_size=place.local_world_size,
            cross_rank=place.node_rank,
            cross_size=cross_size or max(place.node_rank + 1, -(-place.world_size // place.local_world_size)),
            chief_ip=chief_ip,
            timeout_s=timeout_s,
        )
        made._meeting = meeting
        return made

    @property
    def is_chief(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def is_local_chief(self) -> bool:
        return self.local_rank == 0

    @property
    def place(self) -> Place:
        return Place(
            world_rank=self.rank,
            local_rank=self.local_rank,
            node_rank=self.cross_rank,
            world_size=self.size,
            local_world_size=self.local_size,
        )

    # The same numbers by the names under which many scripts ask for them.

    def get_rank(self) -> int:
        return self.rank

    def get_size(self) -> int:
        return self.size

    def get_local_rank(self) -> int:
        return self.local_rank

    def get_local_size(self) -> int:
        return self.local_size

    def get_num_agents(self) -> int:
        """`cross_size`: the number of machines."""
        return self.cross_size

    def gather(self, stuff: Any) -> list[Any] | None:
        """What all ranks give, in rank order, on the chief; None elsewhere."""
        return self._collect("all", "gather", stuff, self.size)

    def allgather(self, stuff: Any) -> list[Any]:
        """What all ranks give, in rank order, on every rank."""
        return self._collect("all", "allgather", stuff, self.size) or []

    def broadcast(self, stuff: Any) -> Any:
        """What the chief gives, on every rank."""
        return self._spread("all", stuff, self.size, self.is_chief)

    def gather_local(self, stuff: Any) -> list[Any] | None:
        """As `gather`, among the ranks of this machine."""
        return self._collect(self._local, "gather_local", stuff, self.local_size)

    def allgather_local(self, stuff: Any) -> list[Any]:
        """As `allgather`, among the ranks of this machine."""
        return self._collect(self._local, "allgather_local", stuff, self.local_size) or []

    def broadcast_local(self, stuff: Any = None) -> Any:
        """As `broadcast`, from the machine's first rank to those of this machine."""
        return self._spread(self._local, stuff, self.local_size, self.is_local_chief)

    @property
    def _local(self) -> str:
        return f"machine {self.cross_rank}"

    def _collect(self, scope: str, op: str, stuff: Any, size: int) -> list[Any] | None:
        if size == 1:
            return [stuff]
        with self._turn:
            payloads = self.channel().exchange(scope, op, parcel.dumps(stuff))
        return None if payloads is None else [parcel.loads(payload) for payload in payloads]

    def _spread(self, scope: str, stuff: Any, size: int, is_source: bool) -> Any:
        if size == 1:
            return stuff
        with self._turn:
            op = "broadcast" if scope == "all" else "broadcast_local"
            payload = self.channel().exchange(scope, op, parcel.dumps(stuff) if is_source else b"")
        return stuff if is_source else parcel.loads(payload)

    def channel(self) -> Any:
        """The connection, made at the first call: all ranks have to come."""
        if self._is_closed:
            raise TrainerStateError("This DistributedContext is closed, as core.init(distributed=...) does at its end.")
        if self._channel is None:
            self._channel = connect(self.place, self._meeting, self.timeout_s)
        return self._channel

    def close(self) -> None:
        """Idempotent."""
        self._is_closed = True
        if self._channel is not None:
            self._channel.close()

    def __enter__(self) -> DistributedContext:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_six(given: dict[str, int | None]) -> None:
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(_SIX):
        return
    if missing:
        raise ArgumentError(
            f"DistributedContext(...) lacks {', '.join(missing)}: give all of {', '.join(_SIX)}, or none of them."
        )
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise ArgumentError(f"DistributedContext({name}={value!r}): expected a whole number.")
    for what in ("", "local_", "cross_"):
        rank, size = given[f"{what}rank"], given[f"{what}size"]
        if rank is not None and size is not None and not 0 <= rank < size:
            raise ArgumentError(f"DistributedContext({what}rank={rank}, {what}size={size}): ranks count from 0.")
