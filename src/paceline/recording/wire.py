"""A session that is recorded in its own process, without a driver: a loop on rank 0, or a test."""

import threading
from contextlib import ExitStack
from typing import Any

from paceline.errors import CheckpointNotFoundError
from paceline.recording.recorder import Recorder
from paceline.workers.base import Place
from paceline.workers.reports import unpack


class RecorderWire:
    """The worker's end of no connection: what the session sends is recorded before `send` returns. Without a recorder
    nobody listens, and everything is dropped. Thread-safe."""

    def __init__(self, place: Place, recorder: Recorder | None):
        self.place = place
        self.address = "127.0.0.1"
        self.shared: dict[str, Any] = {}
        self.leaving = ExitStack()
        self.stopping = False
        self._recorder = recorder
        self._turn = threading.RLock()
        """Checkpoints are told from a thread of their own, and who listens expects one at a time."""
        self.delivery_error: BaseException | None = None
        """What the recorder has raised first, for a callback mostly. The loop sees it too, and may have caught it."""

    def report(self, packed: bytes) -> None:
        if self._recorder is not None:
            self.send("report", unpack(packed))

    def send(self, kind: str, value: Any) -> None:
        if self._recorder is None:
            return
        try:
            with self._turn:
                self._recorder.take(0, kind, value)
        except BaseException as error:
            self.delivery_error = self.delivery_error or error
            raise

    def ask(self, topic: str, value: Any, timeout_s: float | None = None) -> Any:
        with self._turn:
            answer = self._answer(topic, value)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _answer(self, topic: str, value: Any) -> Any:
        recorder = self._recorder
        if topic == "checkpoint":
            missing = CheckpointNotFoundError("Only rank 0 is recorded here: other ranks cannot load what was saved.")
            return missing if recorder is None else recorder.find(value) or missing
        return recorder.saved.relay.answer(value) if topic == "storage" and recorder is not None else None

    def flush(self) -> None:
        pass
