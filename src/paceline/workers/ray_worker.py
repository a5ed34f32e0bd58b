"""The worker's own side on a Ray cluster: the body of an actor that runs one call at a time in a thread.

The driver keeps one `poll` of each actor open; it is answered with everything that has gathered as soon as there is
something, so a report costs an append and the driver makes one round trip for many of them. Of one that has asked
something, the answer is the next poll. What is asked directly goes past Ray, if it can: see `ray_direct`.
"""

import contextlib
import faulthandler
import importlib
import os
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from paceline import frameworks
from paceline.no_collection import no_collection
from paceline.workers import parcel
from paceline.workers.base import Place
from paceline.workers.garbage import Garbage
from paceline.workers.heap import keep_freed_memory
from paceline.workers.outcome import describe_error, pack_value
from paceline.workers.output import LogTail, redirect_output
from paceline.workers.questions import Questions, answered
from paceline.workers.ray_direct import LINE, LineEnd
from paceline.workers.ray_process import own_birth
from paceline.workers.sigterm import on_sigterm

BATCH_S = 0.05
"""How long reports may gather before a poll is answered."""

FLUSH_S = 2.0

_SPENT_S = 0.5
"""How long a call may take to end whose process is of no use afterwards."""

QUEUE_LIMIT = 100_000
"""Messages that may wait for a slow driver before `report` itself waits."""


class Unwind(BaseException):
    """Raised inside a call that has to end because the group it belongs to is broken."""


class RayWire:
    """This worker's end of the connection: a bounded queue that `poll` empties. Thread-safe."""

    def __init__(self, address: str):
        self.epoch = 0
        self.place = Place()
        self.address = address
        self.shared: dict[str, Any] = {}
        self.leaving = contextlib.ExitStack()
        self.is_spent = self.stopping = False
        self.is_unwinding = False
        self.caller: threading.Thread | None = None
        self._waiting: deque[tuple[str, Any]] = deque()
        self._is_waited_for = False
        self._changed = threading.Condition()
        self._urgent = False
        self._on_its_way = False
        self.questions = Questions()
        self._has_asked_for_line = False
        self._line: LineEnd | None = None

    def report(self, packed: bytes) -> None:
        """Without a lock: a poll that finds nothing says so before it looks once more, and then it is woken."""
        if self.is_unwinding:
            self._refuse()
            return
        self._waiting.append(("report", packed))
        if self._is_waited_for:
            with self._changed:
                self._changed.notify_all()
        if len(self._waiting) >= QUEUE_LIMIT:
            with self._changed:
                self._changed.wait_for(lambda: len(self._waiting) < QUEUE_LIMIT or self.is_unwinding)

    def send(self, kind: str, value: Any) -> None:
        if self.is_unwinding:
            self._refuse()
            return
        self._waiting.append((kind, value))
        with self._changed:
            self._urgent = True
            self._changed.notify_all()

    def _refuse(self) -> None:
        """The call ends here. Nobody listens any more to another thread that the function has left behind."""
        if threading.current_thread() is self.caller:
            raise Unwind

    def ask(self, topic: str, value: Any, timeout_s: float | None = None) -> Any:
        return self.questions.ask(lambda number: self._put_question(number, topic, value), timeout_s)

    def ask_directly(self, topic: str, value: Any) -> Any:
        """From the second time on past Ray, if this worker is where the driver is."""
        if not self._has_asked_for_line:
            self._has_asked_for_line = True
            address = self.ask(LINE, None)
            if address is not None:
                with contextlib.suppress(OSError):
                    self._line = LineEnd(address)
                self.send(LINE, self._line is not None)
        elif self._line is not None:
            return self._ask_over(self._line, topic, value)
        return self.ask(topic, value)

    def _ask_over(self, line: LineEnd, topic: str, value: Any) -> Any:
        if self.is_unwinding:
            raise Unwind
        try:
            answer = line.ask(topic, value)
        except (EOFError, OSError):
            if self.is_unwinding:
                raise Unwind from None
            raise
        return answered(answer)

    def hang_up(self) -> None:
        """In the thread of the call, at the latest when it is over: the next one asks for a line of its own."""
        with self._changed:  # nobody wakes it now
            line, self._line, self._has_asked_for_line = self._line, None, False
            if line is not None:
                line.close()

    def _put_question(self, number: int, topic: str, value: Any) -> None:
        """In any thread: once the call is unwinding, no answer will come."""
        if self.is_unwinding:
            raise Unwind
        self.send("asked", (number, topic, value))

    def take(self, epoch: int, timeout_s: float) -> list[tuple[str, Any]]:
        """Everything that waits, as soon as there is something, and a moment later if it can wait. A poll of an earlier
        epoch, which nobody waits for any more, takes nothing away."""
        with self._changed:
            if epoch == self.epoch:  # whoever asks again has got the last answer
                self._on_its_way = False
                self._changed.notify_all()
            self._is_waited_for = True
            self._changed.wait_for(lambda: self._waiting or self._is_over(epoch), timeout_s)
            self._is_waited_for = False
            if self._waiting and not self._urgent:
                self._changed.wait_for(lambda: self._urgent or self._is_over(epoch), BATCH_S)
            return self._take_all() if epoch == self.epoch else []

    def take_rest(self) -> list[tuple[str, Any]]:
        """Everything that waits, now."""
        with self._changed:
            return self._take_all()

    def _take_all(self) -> list[tuple[str, Any]]:
        self._urgent = False
        taken = [self._waiting.popleft() for _ in range(len(self._waiting))]
        self._on_its_way = bool(taken)
        self._changed.notify_all()
        return taken

    def _is_over(self, epoch: int) -> bool:
        return self.is_unwinding or epoch != self.epoch

    def flush(self) -> None:
        """Until everything was taken and has arrived, which the next poll tells. A driver that does not poll has
        stopped listening; it is not waited for. Once the call is being unwound, nothing that depends on this may be
        done any more."""
        with self._changed:
            self._urgent = True
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self.is_unwinding or not (self._waiting or self._on_its_way),
                FLUSH_S,
            )
            if self.is_unwinding:
                raise Unwind

    def begin_unwinding(self) -> None:
        with self._changed:
            self.stopping = self.is_unwinding = True
            self._changed.notify_all()
            if self._line is not None:
                self._line.wake()
        self.questions.abandon(Unwind())

    def begin_epoch(self, epoch: int) -> None:
        with self._changed:
            self.epoch, self.is_unwinding = epoch, False
            self._waiting.clear()
            self._urgent = self._on_its_way = False
            self._changed.notify_all()


class RayWorker:
    """The methods the driver calls. Ray runs them in threads of their own, so a poll does not block a stop."""

    def __init__(self, preload: Sequence[str]):
        import ray

        self._node_ip: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._node_id = ray.get_runtime_context().get_node_id()
        self._gpu_ids = tuple(str(gpu) for gpu in ray.get_gpu_ids())
        self._wire = RayWire(self._node_ip)
        self._thread: threading.Thread | None = None
        self._log = _catch_output()
        on_sigterm(self._preempt)
        self._importing = threading.Lock()
        self._garbage = Garbage()
        keep_freed_memory()
        self.preload(preload)

    def preload(self, modules: Sequence[str]) -> None:
        """Import while there is time; who takes a place meanwhile waits for the end of it."""
        with self._importing, no_collection():
            for module in modules:
                with contextlib.suppress(ImportError):  # whoever needs it gets the error, in a call, with a traceback
                    importlib.import_module(module)
            self._garbage.leave_modules_alone()

    def hello(self) -> dict[str, Any]:
        return {
            "node_id": self._node_id,
            "node_ip": self._node_ip,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "gpu_ids": self._gpu_ids,
            "birth": own_birth(),
        }

    def settle(self, epoch: int, place: Place, environ: dict[str, str], sys_path: list[str], cwd: str) -> None:
        """Take a place in a new group, in the surroundings of the driver as far as they exist here."""
        with contextlib.suppress(OSError):
            os.chdir(cwd)
        with self._importing:
            self._wire.place = place
        self._wire.begin_epoch(epoch)
        os.environ.update(environ)
        for name, value in frameworks.interface_variables(_interface_of(self._node_ip)).items():
            os.environ.setdefault(name, value)
        sys.path[:] = [*sys_path, *(entry for entry in sys.path if entry not in sys_path)]

    def begin(self, payload: bytes) -> None:
        self._wire.stopping = False
        self._thread = threading.Thread(target=self._answer, args=(payload,), name="paceline-call", daemon=True)
        self._wire.caller = self._thread
        self._thread.start()

    def poll(self, epoch: int, timeout_s: float) -> list[tuple[str, Any]]:
        taken = self._wire.take(epoch, timeout_s)
        if text := "".join(self._log.texts()):
            taken.insert(0, ("printed", text))
        return taken

    def answer(self, number: int, value: Any) -> None:
        self._wire.questions.answer(number, value)

    def answer_and_poll(self, number: int, value: Any, epoch: int, timeout_s: float) -> list[tuple[str, Any]]:
        """In one task: with two, a quick question and its answer would take twice as long."""
        self.answer(number, value)
        return self.poll(epoch, timeout_s)

    def stop(self) -> None:
        self._wire.stopping = True

    def unwind(self, grace_s: float) -> tuple[bool, list[tuple[str, Any]]]:
        """Make the running call end, and leave the group; says whether this worker may join another, which it may not
        if the call goes on after the grace period, and what the call had still to say.

        It ends where it next touches the session, or by the error of a collective in which a rank is missing: others
        may be waiting for us in one, and leaving makes it fail there. Raising in it from outside, at any line, could
        leave a lock behind that nobody releases.
        """
        self._wire.begin_unwinding()
        if self._thread is not None:
            self._thread.join(min(grace_s, _SPENT_S) if self._wire.is_spent else grace_s)
            if self._thread.is_alive():
                return False, self._wire.take_rest()
            self._thread = None
        return self._leave_group(), self._wire.take_rest()

    def _preempt(self) -> None:
        """SIGTERM: an idle worker ends, a call may save first. The driver decides when it has had enough time."""
        if self._thread is None or not self._thread.is_alive():
            os._exit(128 + signal.SIGTERM)
        self._wire.send("preempted", "got SIGTERM")
        self._wire.stopping = True  # afterwards, so that the driver knows why the function returns

    def _leave_group(self) -> bool:
        self._garbage.collect()
        try:
            self._wire.leaving.close()
        except Exception:
            traceback.print_exc()
            return False
        return not self._wire.is_spent

    def stacks(self) -> str:
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            return file.read().decode(errors="replace")

    def _answer(self, payload: bytes) -> None:
        with contextlib.suppress(OSError):  # Ray gives way to everybody else; training does not, where it may choose
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 0)
        with contextlib.suppress(Unwind):
            self._call(payload)

    def _call(self, payload: bytes) -> None:
        try:
            with no_collection():  # it imports what the function is made of
                fn, args = parcel.loads(payload)
            try:
                value = pack_value(fn(self._wire, *args))
            finally:
                self._wire.hang_up()  # before anybody knows of the end: the next call may come at once
        except Unwind:
            raise
        except BaseException as error:
            self._wire.send("raised", describe_error(error))
            del error
        else:
            self._wire.send("returned", value)
        self._garbage.collect()


def _catch_output() -> LogTail:
    """Send this process's output to a file without a name, which goes away with the process, however it ends."""
    descriptor, path = tempfile.mkstemp(prefix="paceline_output_")
    os.close(descriptor)
    tail = LogTail(Path(path))
    list(tail.texts())  # opens it
    redirect_output(path)
    os.unlink(path)
    return tail


def _interface_of(address: str) -> str:
    """The network interface that has the address by which Ray knows this node."""
    interfaces: dict[str, list[Any]] = psutil.net_if_addrs()
    return next((name for name, ones in interfaces.items() if any(one.address == address for one in ones)), "lo")
