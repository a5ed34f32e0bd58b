"""How ranks that somebody else has started find each other: rank 0 listens, and tells the others where.

    torch      through the store of its process group, or the one that the launcher has made
    horovod    through a broadcast of its own
    explicit   at the address and port that all ranks were given
"""

from __future__ import annotations

import os
import secrets
import socket
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from paceline.errors import ArgumentError, TrainerStateError
from paceline.workers.base import Place

if TYPE_CHECKING:
    from paceline.core.hub import Hub
    from paceline.core.link import Link

TOKEN_VARIABLE = "PACELINE_TOKEN"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Address(NamedTuple):
    """Where rank 0 listens, and the secret without which it does not."""

    host: str
    port: int
    token: str


class Meeting(Protocol):
    """Called once on each rank, by all of them."""

    def wanted(self, place: Place) -> Address:
        """On rank 0: where to listen; port 0 for any."""

    def tell(self, address: Address, timeout_s: float) -> None:
        """On rank 0: it listens there."""

    def find(self, place: Place, timeout_s: float) -> Address:
        """On the others. TimeoutError if rank 0 has not told in time."""


def connect(place: Place, meeting: Meeting, timeout_s: float) -> Hub | Link:
    """All ranks together; blocks until they are there."""
    from paceline.core.hub import Hub
    from paceline.core.link import Link

    if place.world_rank:
        return Link(meeting.find(place, timeout_s), place, timeout_s)
    hub = Hub(meeting.wanted(place), place.world_size, timeout_s)
    try:
        meeting.tell(hub.address, timeout_s)
        hub.wait_for_all()
    except BaseException:
        hub.close()
        raise
    return hub


class ExplicitMeeting:
    """At a port that all ranks know. What they send is unpickled, which runs code: off this machine they have to know a
    common secret, too."""

    def __init__(self, chief_ip: str | None, chief_port: int | None):
        self._chief_ip, self._chief_port = chief_ip, chief_port

    def wanted(self, place: Place) -> Address:
        if self._chief_port is None:
            raise ArgumentError(
                "DistributedContext(...) of several ranks needs chief_port, a free port of rank 0's machine, the same on "
                "all ranks; or make it with from_torch_distributed() or from_horovod(hvd)."
            )
        host = self._chief_ip or "127.0.0.1"
        token = os.environ.get(TOKEN_VARIABLE, "")
        if not token and host not in _LOOPBACK:
            raise ArgumentError(
                f"DistributedContext(chief_ip={host!r}, chief_port=...) is open to other machines, and no secret tells "
                f"your ranks from others: set the environment variable {TOKEN_VARIABLE} to the same text on all ranks."
            )
        return Address(host, self._chief_port, token)

    def tell(self, address: Address, timeout_s: float) -> None:
        pass

    def find(self, place: Place, timeout_s: float) -> Address:
        return self.wanted(place)


class TorchMeeting:
    """Through torch's store. With a secret that only those know who are in it."""

    def __init__(self, chief_ip: str | None):
        self._chief_ip = chief_ip

    def wanted(self, place: Place) -> Address:
        return Address(_listen_at(place, self._chief_ip), 0, secrets.token_hex(16))

    def tell(self, address: Address, timeout_s: float) -> None:
        from paceline.core.torch_store import meeting_store

        meeting_store(timeout_s).put(" ".join(map(str, address)))

    def find(self, place: Place, timeout_s: float) -> Address:
        from paceline.core.torch_store import meeting_store

        host, port, token = meeting_store(timeout_s).get().split(" ")
        return Address(host, int(port), token)


class HorovodMeeting:
    """Through its own broadcast of objects."""

    def __init__(self, hvd: Any, chief_ip: str | None):
        self._hvd, self._chief_ip = hvd, chief_ip

    def wanted(self, place: Place) -> Address:
        return Address(_listen_at(place, self._chief_ip), 0, secrets.token_hex(16))

    def tell(self, address: Address, timeout_s: float) -> None:
        self._hvd.broadcast_object(tuple(address), root_rank=0, name="paceline")

    def find(self, place: Place, timeout_s: float) -> Address:
        return Address(*self._hvd.broadcast_object(None, root_rank=0, name="paceline"))


class Unmet:
    """Of a single process, which has nobody to find."""

    def wanted(self, place: Place) -> Address:
        raise TrainerStateError("This process is alone: there are no other ranks to connect to.")

    def tell(self, address: Address, timeout_s: float) -> None:
        raise TrainerStateError("This process is alone: there is nobody to tell.")

    def find(self, place: Place, timeout_s: float) -> Address:
        raise TrainerStateError("This process is alone: there is no other rank 0.")


def _listen_at(place: Place, chief_ip: str | None) -> str:
    """Loopback on one machine, where nobody else can come; else an address of this one that others reach."""
    if place.local_world_size >= place.world_size:
        return "127.0.0.1"
    if chief_ip is not None:
        return chief_ip
    master = os.environ.get("MASTER_ADDR", "")
    for remote in (master, "192.0.2.1"):  # the second one is nobody's: only the way there is asked for
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((remote, 9))  # sends nothing
                own: str = probe.getsockname()[0]
        except OSError:
            continue
        if remote and not own.startswith("127."):
            return own
    return socket.gethostbyname(socket.gethostname())
