"""A session that is recorded in its own process, without a driver: a loop on rank 0, or a test."""

from contextlib import ExitStack
from typing import Any

from paceline.checkpoints.part import Found
from paceline.errors import CheckpointNotFoundError
from paceline.recording.recorder import Recorder
from paceline.workers.base import Place
from paceline.workers.reports import unpack


class RecorderWire:
    """The worker's end of no connection: what the session sends is recorded before `send` returns."""

    def __init__(self, recorder: Recorder, place: Place | None = None):
        self.place = place or Place()
        self.address = "127.0.0.1"
        self.shared: dict[str, Any] = {}
        self.leaving = ExitStack()
        self.stopping = False
        self._recorder = recorder

    def report(self, packed: bytes) -> None:
        self._recorder.take(0, "report", unpack(packed))

    def send(self, kind: str, value: Any) -> None:
        self._recorder.take(0, kind, value)

    def ask(self, topic: str, value: Any, timeout_s: float | None = None) -> Any:
        if topic == "storage":
            answer = self._recorder.saved.relay.answer(value)
        elif topic == "checkpoint":
            answer = self._recorder.saved.find(0, value) or CheckpointNotFoundError(f"checkpoint {value} is not saved")
        else:
            answer = None
        if isinstance(answer, BaseException):
            raise answer
        found: Found | Any = answer
        return found

    def flush(self) -> None:
        pass
