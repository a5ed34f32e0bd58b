"""A session without a driver: run a training function, or a part of it, as if on a given rank."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from paceline.backends.base import BackendConfig
from paceline.checkpoints import CheckpointStrategy
from paceline.rank_session import Session, Task
from paceline.recording.ledger import Ledger
from paceline.recording.saved import Saved
from paceline.runs import RunRequest
from paceline.session import open_session
from paceline.workers.base import Place
from paceline.workers.reports import unpack


class RecordingWire:
    """Keeps what the session sends: `reports`, and everything else in `sent` as (kind, value). Its checkpoints stay in
    memory; only rank 0 finds its own again, as the shared state is that of rank 0."""

    def __init__(self, place: Place, checkpoint: dict[str, Any] | None = None):
        self.place = place
        self.address = "127.0.0.1"
        self.shared: dict[str, Any] = {}
        self.leaving = ExitStack()
        self.is_spent = False
        self.stopping = False
        self.reports: list[dict[str, Any]] = []
        self.sent: list[tuple[str, Any]] = []
        self.request = RunRequest(
            train_func=lambda: None, checkpoint=checkpoint, checkpoint_strategy=CheckpointStrategy(num_to_keep=0)
        )
        self._saved, self._ledger = Saved(self.request, "memory"), Ledger(1, first_id=1)

    def task(self) -> Task:
        start, landmarks = self._saved.begin(self.place.world_size)
        self._ledger = Ledger(self.place.world_size, start.first_id)
        return Task(self.request, start, BackendConfig(), landmarks)

    def report(self, packed: bytes) -> None:
        self.reports.append(unpack(packed))

    def send(self, kind: str, value: Any) -> None:
        self.sent.append((kind, value))
        if kind == "part":
            self._ledger.add(value)

    def ask(self, topic: str, value: Any, timeout_s: float | None = None) -> Any:
        if topic == "storage":
            answer = self._saved.relay.answer(value)
        elif topic == "checkpoint":
            answer = self._saved.find(value, self.place.world_rank, self._ledger) or TimeoutError(
                "there is no rank 0 here"
            )
        elif topic == "stop":  # at this very call: the other ranks are not there to differ
            answer = value
        else:
            raise NotImplementedError(f"there is no driver to ask about {topic}")
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def flush(self) -> None:
        pass


@contextmanager
def as_worker(place: Place | None = None, checkpoint: dict[str, Any] | None = None) -> Iterator[RecordingWire]:
    """Inside the block, this process is a worker at that place; its checkpoints stay in memory.

    >>> with as_worker(Place(world_rank=1, world_size=2)) as wire:
    ...     train_func({"lr": 0.1})
    >>> wire.reports
    """
    wire = RecordingWire(place or Place(), checkpoint)
    with open_session(wire, wire.task()):
        yield wire


def make_session(place: Place | None = None, wire: RecordingWire | None = None) -> Session:
    """A real session that is not the current one, for tests that install it themselves."""
    wire = wire or RecordingWire(place or Place())
    return Session(wire, wire.task())
