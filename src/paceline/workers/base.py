"""The seam between the driver and its workers.

The driver talks to a `WorkerGroup`; what happened in the workers comes back as the small values below: the
reports of a worker in their order, its messages in theirs, and each message after the reports that were made before
it. (A report that was made after a message may come before it, by one `poll`.) Engines differ in where workers live,
never in what these values mean.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from paceline.workers import contents, surroundings
from paceline.workers.place import Place, place_from_environ, rank_environ

__all__ = [
    "Asked",
    "Call",
    "Died",
    "Engine",
    "Event",
    "Place",
    "Preempted",
    "Preload",
    "Printed",
    "Raised",
    "Resources",
    "Returned",
    "Sent",
    "Size",
    "Wire",
    "WorkerGroup",
    "WorkerInfo",
    "place_from_environ",
    "rank_environ",
]


@dataclass(frozen=True)
class WorkerInfo:
    """A running worker as the driver sees it."""

    place: Place
    pid: int
    host: str
    gpu_ids: tuple[str, ...] = ()
    node_id: str = ""
    """The name that the engine's cluster has for the machine, if there is one."""

    @property
    def rank(self) -> int:
        return self.place.world_rank


@dataclass(frozen=True)
class Resources:
    """What one worker may use. `cpus` is None when the user did not say: the engine then divides the machine."""

    cpus: float | None = None
    gpus: float = 0
    custom: Mapping[str, float] = field(default_factory=dict)
    sees_all_gpus: bool = False
    """Whether one that has no GPU of its own sees all of the machine: see `BackendConfig`."""


@dataclass(frozen=True)
class Size:
    """How many workers a group has: as many as can be had from `min` to `max`, which may be infinite. After a loss,
    more than `min` are waited for no longer than `replacement_timeout_s`."""

    min: int
    max: float
    replacement_timeout_s: float = 30.0

    def clamp(self, num_available: float) -> int:
        return int(max(self.min, min(num_available, self.max)))


@dataclass(frozen=True)
class Preload:
    """Modules that workers had better have imported: `to_join` before they become a group, `to_train` before the first
    step of training. Where an import costs waiting, the second kind is left to those who have time."""

    to_join: tuple[str, ...] = ()
    to_train: tuple[str, ...] = ()

    def plus(self, *to_train: str) -> Preload:
        return Preload(self.to_join, (*self.to_train, *to_train))


@dataclass(frozen=True)
class Sent:
    """Something the user's function sent through the session: a report, a part of a checkpoint, a note. Or from the
    worker itself, at the end of a call: files of the user's that it has "imported"."""

    rank: int
    kind: str
    value: Any


@dataclass(frozen=True)
class Returned:
    """A submitted call ended with this value."""

    rank: int
    value: Any


@dataclass(frozen=True)
class Raised:
    """A submitted call raised."""

    rank: int
    type_name: str
    message: str
    traceback: str
    origin: BaseException | Callable[[], BaseException | None] | None = None
    """The exception, or what unpacks it. That may import a framework, for seconds: who only asks what kind of error it
    was does not wait for it."""

    @cached_property
    def exception(self) -> BaseException | None:
        """None when it could not be brought to the driver."""
        return self.origin if isinstance(self.origin, BaseException | None) else self.origin()


@dataclass(frozen=True)
class Died:
    """A worker process is gone; `reason` says how, in words."""

    rank: int
    reason: str


@dataclass(frozen=True)
class Preempted:
    """A worker has been told that it will be taken away soon; until then it goes on."""

    rank: int
    reason: str


DIRECT = 0
"""The number of a question that was asked by `DirectWire.ask_directly`."""


@dataclass(slots=True)
class Asked:
    """A worker waits for `WorkerGroup.answer` to this question. There may be one for every step of a rank: one that is
    frozen takes three times as long to make."""

    rank: int
    number: int
    topic: str
    value: Any


@dataclass(frozen=True)
class Printed:
    """Text that a worker wrote to its standard output or error."""

    rank: int
    text: str


Event = Sent | Returned | Raised | Died | Preempted | Asked | Printed


@dataclass(frozen=True)
class Call:
    """`fn(wire, *args)`, to be run in a worker. One Call may go to many ranks: it is packed once. `label` is what an
    error calls it."""

    fn: Callable[..., Any]
    args: tuple[Any, ...] = ()
    label: str = "the call"

    @cached_property
    def packed(self) -> bytes:
        with contents.explained(self._named, self.label):
            return surroundings.pack_call(self.fn, self.args)

    def _named(self) -> dict[str, Any]:
        names = [*inspect.signature(self.fn).parameters][1:]
        return {"the function": self.fn, **dict(zip(names, self.args, strict=False))}


class Wire(Protocol):
    """The worker's end: every call that runs in a worker gets it as its first argument."""

    place: Place
    address: str
    """Where the other workers of the group can reach this one."""
    is_spent: bool
    """Set by who joins a group if this process can be in no other: it is replaced then, and not waited for."""

    def report(self, packed: bytes) -> None:
        """The hot path: hand over a report, packed by `reports.pack`, and return at once. One thread at a time; a
        signal handler may interrupt it and report too."""

    def send(self, kind: str, value: Any) -> None:
        """Anything else for the driver, where it arrives after the reports made before it."""

    def ask(self, topic: str, value: Any, timeout_s: float | None = None) -> Any:
        """Put a question to the driver and wait for the answer; an exception as the answer is raised here. Without a
        timeout it waits as long as the call may last: a driver that gives up ends the call."""

    def flush(self) -> None:
        """Block until what was reported and sent so far would survive the end of this worker."""

    @property
    def stopping(self) -> bool:
        """Whether the driver has asked the function to end."""

    @property
    def shared(self) -> dict[str, Any]:
        """What outlives a call in this worker: the object of the class API lives here."""

    @property
    def leaving(self) -> ExitStack:
        """How this worker leaves the group it has joined: whoever joins it puts here what undoes that.

        The engine closes it while no call runs, before the worker may join another group; a process that ends takes its
        group with it. If that raises, this process can join no other, and is replaced.
        """


class DirectWire(Wire, Protocol):
    """Of engines whose workers live while nothing is asked of them."""

    def ask_directly(self, topic: str, value: Any) -> Any:
        """As `ask`, for a call that has nothing else to do than wait for the answer, in its main thread, and no signal
        handler may do it too. It is quicker: nobody else has to read the answer first. But the engine carries neither,
        so nothing of its own can be in them, as an ObjectRef of Ray's."""

    def hang_up(self) -> None:
        """This call asks nothing directly any more. Idempotent."""


class WorkerGroup(Protocol):
    """Workers, from `start` to `close`; their number may change with each `start`, within the group's `Size`. Not
    thread-safe, except `request_stop` and `stacks`."""

    infos: Sequence[WorkerInfo]

    def start(self) -> None:
        """Make the group whole: all workers there, idle, and in no process group. Blocking.

        Raises WorkerStartError or ResourcesError, and then leaves nothing running.
        """

    def submit(self, calls: Mapping[int, Call], logs: Mapping[int, Path] | None = None) -> None:
        """Begin a call on each named rank; its output goes to that rank's log.

        A worker does one call at a time. Each call is answered by one Returned, Raised or Died;
        a worker may also die after its answer.
        """

    def poll(self, timeout_s: float, deliver: Callable[[Event], None]) -> None:
        """Hand over what has happened, waiting up to `timeout_s` for the first event."""

    def answer(self, question: Asked, value: Any) -> None:
        """Let the worker that asked go on with this value. Nothing happens when it is gone."""

    def can_grow(self) -> bool:
        """Whether `start` would now give more workers than there are. Cheap; asked once in a while during a run."""

    def request_stop(self) -> None:
        """Make `should_stop()` true in the running calls."""

    def stacks(self, timeout_s: float = 2.0) -> dict[int, str]:
        """The Python stacks of every rank, also of one that is stuck in C code. StackDumpError if there is none."""

    def abort(self, deliver: Callable[[Event], None]) -> None:
        """End the running calls, by force if need be, and hand over what they had sent until then. `start` then makes
        the group whole again."""

    def healthy(self) -> bool:
        """Whether every worker is alive and idle, ready for another call."""

    def close(self, grace_s: float = 0.0) -> None:
        """End every worker: politely within `grace_s`, then by force. Idempotent."""


@runtime_checkable
class Engine(Protocol):
    """Makes worker groups. `name` is what the run folder records."""

    name: str

    def warm(self, preload: Preload) -> None:
        """Begin, in the background, whatever makes the first group start sooner."""

    def connect(self) -> None:
        """Raise what keeps every group from starting, such as a cluster that is not there. A group does it too."""

    def group(self, size: Size, resources: Resources, preload: Preload) -> WorkerGroup:
        """A group that is not started yet."""

    def has_room_beside(self, resources: Resources) -> bool:
        """Whether there may be, for a moment, a second group beside one whose workers have such resources."""

    def describe(self) -> str:
        """What the workers have to share, for the resource table."""
