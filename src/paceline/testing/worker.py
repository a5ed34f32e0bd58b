"""A session without a driver: run a training function, or a part of it, as if on a given rank."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from paceline.backends.base import BackendConfig
from paceline.checkpoints import CheckpointStrategy
from paceline.session import Session, Task, open_session
from paceline.workers.base import Place
from paceline.workers.reports import unpack


class RecordingWire:
    """Keeps what the session sends: `reports`, and everything else in `sent` as (kind, value)."""

    def __init__(self, place: Place):
        self.place = place
        self.address = "127.0.0.1"
        self.shared: dict[str, Any] = {}
        self.leaving = ExitStack()
        self.stopping = False
        self.reports: list[dict[str, Any]] = []
        self.sent: list[tuple[str, Any]] = []

    def report(self, packed: bytes) -> None:
        self.reports.append(unpack(packed))

    def send(self, kind: str, value: Any) -> None:
        self.sent.append((kind, value))

    def ask(self, topic: str, value: Any) -> Any:
        raise NotImplementedError(f"there is no driver to ask about {topic}")

    def flush(self) -> None:
        pass


@contextmanager
def as_worker(place: Place | None = None, checkpoint: dict[str, Any] | None = None) -> Iterator[RecordingWire]:
    """Inside the block, this process is a worker at that place; its checkpoints stay in memory.

    >>> with as_worker(Place(world_rank=1, world_size=2)) as wire:
    ...     train_func({"lr": 0.1})
    >>> wire.reports
    """
    wire = RecordingWire(place or Place())
    with open_session(wire, _task(checkpoint)):
        yield wire


def make_session(place: Place | None = None, wire: RecordingWire | None = None) -> Session:
    """A real session that is not the current one, for tests that install it themselves."""
    return Session(wire or RecordingWire(place or Place()), _task(None))


def _task(checkpoint: dict[str, Any] | None) -> Task:
    return Task(
        fn=lambda: None,
        config=None,
        backend=BackendConfig(),
        checkpoint_root="",
        strategy=CheckpointStrategy(num_to_keep=0),
        resume_from=checkpoint,
    )
