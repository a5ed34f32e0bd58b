"""The inline engine: one worker, which is this very process. A debugger works, and nothing is started.

The call runs inside `poll`, in the caller's thread, and each thing it sends is delivered before `send` returns.
"""

import os
import socket
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from paceline.errors import StackDumpError, TrainerStateError
from paceline.workers.base import (
    Asked,
    Call,
    Event,
    Place,
    Preload,
    Raised,
    Resources,
    Returned,
    Sent,
    Size,
    WorkerInfo,
    rank_environ,
)
from paceline.workers.devices import gpu_ids, share_gpus
from paceline.workers.outcome import message_of, text_of
from paceline.workers.questions import Questions
from paceline.workers.reports import unpack

_calling = threading.RLock()
"""Held by the thread that is in a call. Of the process, as what a call uses: the current session, a process group. A
call may be made within another."""


class InlineEngine:
    name = "inline"

    def warm(self, preload: Preload) -> None:
        pass

    def connect(self) -> None:
        pass

    def group(self, size: Size, resources: Resources, preload: Preload) -> "InlineGroup":
        return InlineGroup(resources)

    def has_room_beside(self, resources: Resources) -> bool:
        """There is one process."""
        return False

    def describe(self) -> str:
        return "this process"


class InlineGroup:
    """See `WorkerGroup` for the contract. Exceptions keep their traceback, since they never leave the process."""

    def __init__(self, resources: Resources) -> None:
        self.infos: Sequence[WorkerInfo] = ()
        self._resources = resources
        self._wire: InlineWire | None = None
        self._call: Call | None = None
        self._leaving = ExitStack()

    def start(self) -> None:
        [share] = share_gpus(1, self._resources.gpus, gpu_ids() if self._resources.gpus else [])
        place = Place(device_index=share.index if share else None)
        self.infos = [WorkerInfo(place, os.getpid(), socket.gethostname(), share.ids if share else ())]
        self._wire = InlineWire(place, self._leaving)
        for name, value in rank_environ(place).items():
            if name not in os.environ:
                os.environ[name] = value
                self._leaving.callback(os.environ.pop, name, None)
        _started.add(self)

    def submit(self, calls: Mapping[int, Call], logs: Mapping[int, Path] | None = None) -> None:
        self._call = calls[0]
        if self._wire is not None:
            self._wire.stopping = False

    def poll(self, timeout_s: float, deliver: Callable[[Event], None]) -> None:
        if self._call is None or self._wire is None:
            return
        call, self._call = self._call, None
        self._wire.deliver = deliver
        if not _calling.acquire(blocking=False):
            raise TrainerStateError(
                "With num_workers=0 the function runs in this process, and another thread of it is in such a call: "
                "both would have the same session and process group. Let one wait for the other, or give this Trainer "
                "num_workers=1, a process of its own."
            )
        try:
            event = self._run(call, self._wire)
        finally:
            _calling.release()
        deliver(event)

    def _run(self, call: Call, wire: "InlineWire") -> Event:
        try:
            event: Event = Returned(0, call.fn(wire, *call.args))
        except KeyboardInterrupt:  # from this very keyboard
            raise
        except BaseException as error:
            event = Raised(0, type(error).__qualname__, message_of(error), text_of(error), error)
        if wire.delivery_error is not None:  # then it is not the function that failed, whatever it made of this
            raise wire.delivery_error
        return event

    def answer(self, question: Asked, value: Any) -> None:
        if self._wire is not None:
            self._wire.questions.answer(question.number, value)

    def can_grow(self) -> bool:
        return False

    def request_stop(self) -> None:
        if self._wire is not None:
            self._wire.stopping = True

    def stacks(self, timeout_s: float = 2.0) -> dict[int, str]:
        if self._wire is None:
            raise StackDumpError("There are no workers: stacks can be had between start() and shutdown().")
        frames = sys._current_frames()
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        texts = [f"Thread {names.get(i)}:\n{''.join(traceback.format_stack(f))}" for i, f in frames.items()]
        return {0: "\n".join(texts)}

    def abort(self, deliver: Callable[[Event], None]) -> None:
        self._call = None

    def healthy(self) -> bool:
        return self._wire is not None and self._call is None

    def close(self, grace_s: float = 0.0) -> None:
        # and not in `abort`: nobody waits for us, and the group serves as well once more
        _started.discard(self)
        heir = next(iter(_started), None)
        if heir is None:
            self._leaving.close()
        else:  # what this one has joined, the other uses too
            heir._leaving.callback(self._leaving.pop_all().close)
        self.infos, self._wire, self._call = (), None, None


_started: weakref.WeakSet[InlineGroup] = weakref.WeakSet()
"""They share what the first of them has joined."""


class InlineWire:
    """Delivers at once, in the caller's thread."""

    def __init__(self, place: Place, leaving: ExitStack) -> None:
        self.place = place
        self.leaving = leaving
        self.address = "127.0.0.1"
        self.shared: dict[str, Any] = {}
        self.is_spent = self.stopping = False
        self.deliver: Callable[[Event], None] = lambda event: None
        self.delivery_error: BaseException | None = None
        """What who listens has raised first. The function sees it too, on its own line, and may have caught it."""
        self.questions = Questions()
        self._turn = threading.RLock()
        """Checkpoints are told from a thread of their own, and who listens expects one at a time."""

    def send(self, kind: str, value: Any) -> None:
        self._hand_over(Sent(0, kind, value))

    def ask(self, topic: str, value: Any, timeout_s: float | None = None) -> Any:
        return self.questions.ask(lambda number: self._hand_over(Asked(0, number, topic, value)), timeout_s)

    def _hand_over(self, event: Event) -> None:
        try:
            with self._turn:
                self.deliver(event)
        except BaseException as error:
            self.delivery_error = self.delivery_error or error
            raise

    def flush(self) -> None:
        pass

    def report(self, packed: bytes) -> None:
        self.send("report", unpack(packed))
