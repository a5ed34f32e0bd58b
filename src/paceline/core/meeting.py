"""How ranks that somebody else has started find each other: rank 0 listens, and tells the others where.

session    through whoever records them, in a run that is there
torch      through the store of its process group, or the one that the launcher has made
horovod    through a broadcast of its own
explicit   at the address and port that all ranks were given
"""

from __future__ import annotations

import os
import secrets
import socket
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from paceline.errors import ArgumentError, WorkerStartError
from paceline.rank_session import Session
from paceline.regular_files import open_regular
from paceline.workers.base import Place

if TYPE_CHECKING:
    from paceline.core.hub import Hub
    from paceline.core.link import Link

TOKEN_VARIABLE = "PACELINE_TOKEN"
_RETRY_S = 0.05
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
        """On the others, again if nobody is there. TimeoutError if rank 0 has not told in time."""

    def forget(self) -> None:
        """On rank 0: all have come, or will not."""


def connect(place: Place, meeting: Meeting, timeout_s: float) -> Hub | Link:
    """All ranks together; blocks until they are there."""
    from paceline.core.hub import Hub
    from paceline.core.link import Link

    if place.world_rank:
        return Link(lambda left_s: meeting.find(place, left_s), place, timeout_s)
    hub = Hub(meeting.wanted(place), place, timeout_s)
    try:
        meeting.tell(hub.address, timeout_s)
        hub.wait_for_all()
    except BaseException as error:
        hub.finish(WorkerStartError(f"Rank 0 has given up: {error}"))
        hub.close()
        raise
    finally:
        meeting.forget()
    return hub


class ExplicitMeeting:
    """At a port that all ranks know. What they send is unpickled, which runs code: so they have to know a common
    secret, too. On one machine that is in a file which only this user can read."""

    def __init__(self, chief_ip: str | None, chief_port: int | None):
        self._chief_ip, self._chief_port = chief_ip, chief_port

    def wanted(self, place: Place) -> Address:
        host, port, token = self._told()
        return Address(host, port, token or secrets.token_hex(16))

    def tell(self, address: Address, timeout_s: float) -> None:
        if not self._told().token:
            path = _secret_path(address.port)
            try:
                path.unlink(missing_ok=True)  # of a run that was killed
                with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
                    file.write(address.token)
            except OSError as error:  # somebody else has put something there
                raise WorkerStartError(
                    f"Rank 0 cannot tell the others the secret of this run: {error}. Take another chief_port, or set "
                    f"the environment variable {TOKEN_VARIABLE} to the same text on all ranks."
                ) from error

    def find(self, place: Place, timeout_s: float) -> Address:
        host, port, token = self._told()
        deadline = time.monotonic() + timeout_s
        while not token:
            # Not just open(): another user may have put a pipe there, which nobody ever writes to.
            with suppress(OSError), open(open_regular(_secret_path(port))) as file:
                token = file.read() if os.fstat(file.fileno()).st_uid == os.getuid() else ""
            if not token:
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"Rank 0 does not listen at {host}, port {port}, after {timeout_s:g} s.")
                time.sleep(_RETRY_S)
        return Address(host, port, token)

    def forget(self) -> None:
        if self._chief_port is not None and not self._told().token:
            _secret_path(self._chief_port).unlink(missing_ok=True)

    def _told(self) -> Address:
        if self._chief_port is None:
            raise ArgumentError(
                "DistributedContext(...) of several ranks needs chief_port, a free port of rank 0's machine, the same "
                "on all ranks; or make it with from_torch_distributed() or from_horovod(hvd)."
            )
        host = self._chief_ip or "127.0.0.1"
        token = os.environ.get(TOKEN_VARIABLE, "")
        if not token and host not in _LOOPBACK:
            raise ArgumentError(
                f"DistributedContext(chief_ip={host!r}, chief_port=...) is open to other machines, and no secret tells "
                f"your ranks from others: set the environment variable {TOKEN_VARIABLE} to the same text on all ranks."
            )
        return Address(host, self._chief_port, token)


def _secret_path(port: int) -> Path:
    return Path(tempfile.gettempdir(), f"paceline-{os.getuid()}-{port}.secret")


class SessionMeeting:
    """In a run: through who listens to all its ranks."""

    def __init__(self, running: Session):
        self._session = running
        number = running.extras["num_meetings"] = running.extras.get("num_meetings", 0) + 1
        self._name = f"meeting {number}"  # all ranks meet equally often

    def wanted(self, place: Place) -> Address:
        is_one_machine = place.local_world_size >= place.world_size
        return Address("127.0.0.1" if is_one_machine else self._session.address, 0, secrets.token_hex(16))

    def tell(self, address: Address, timeout_s: float) -> None:
        self._session.put(self._name, _text(address))

    def find(self, place: Place, timeout_s: float) -> Address:
        return _address(self._session.get(self._name, timeout_s))

    def forget(self) -> None:
        pass


class TorchMeeting:
    """Through torch's store. With a secret that only those know who are in it."""

    def __init__(self, chief_ip: str | None):
        self._chief_ip = chief_ip
        self._found: Address | None = None

    def wanted(self, place: Place) -> Address:
        return Address(_listen_at(place, self._chief_ip), 0, secrets.token_hex(16))

    def tell(self, address: Address, timeout_s: float) -> None:
        from paceline.core.torch_store import meeting_store

        meeting_store(0, timeout_s).put(_text(address))

    def find(self, place: Place, timeout_s: float) -> Address:
        from paceline.core.torch_store import meeting_store

        if self._found is None:
            self._found = _address(meeting_store(place.world_rank, timeout_s).get())
        return self._found

    def forget(self) -> None:
        pass


class HorovodMeeting:
    """Through its own broadcast of objects."""

    def __init__(self, hvd: Any, chief_ip: str | None):
        self._hvd, self._chief_ip = hvd, chief_ip
        self._found: Address | None = None

    def wanted(self, place: Place) -> Address:
        return Address(_listen_at(place, self._chief_ip), 0, secrets.token_hex(16))

    def tell(self, address: Address, timeout_s: float) -> None:
        self._hvd.broadcast_object(tuple(address), root_rank=0, name="paceline")

    def find(self, place: Place, timeout_s: float) -> Address:
        if self._found is None:
            self._found = Address(*self._hvd.broadcast_object(None, root_rank=0, name="paceline"))
        return self._found

    def forget(self) -> None:
        pass


def _text(address: Address) -> str:
    return " ".join(map(str, address))


def _address(text: str) -> Address:
    host, port, token = text.split(" ")
    return Address(host, int(port), token)


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
