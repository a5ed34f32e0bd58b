"""The run folder as its driver writes it: what was asked, what happens, and how it ended."""

import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from paceline.checkpoints.storage.base import open_storage
from paceline.errors import ArgumentError, RunNotResumableError, TrainerStateError
from paceline.json_text import encode_document
from paceline.runs.driver_lock import DriverLock
from paceline.runs.durable import Appended, JsonLines, read_json, read_json_lines, write_atomic
from paceline.runs.kept_call import CALL_FILE, keep_call, seal_place
from paceline.runs.logdir import make_run_dir, resolve_logdir, unusable
from paceline.runs.request import RunRequest
from paceline.runs.rows_file import ROWS_FILE, RowsFile
from paceline.runs.status import Heartbeat, RunState, RunStatus, StatusFile

__all__ = ["RunFolder", "resolve_logdir"]

logger = logging.getLogger(__name__)

_MAX_WAITING_LINES = 256
_ENVIRONMENT_TIMEOUT_S = 15.0


class RunFolder:
    """One run, written by the driver alone; all methods may be called from any thread.

    Once the folder exists, storage that refuses (a full disk, a folder somebody deleted) never stops a run:
    the first refusal is logged, the lines that were lost are counted, and an event says how many when there
    is room again, or a warning if there was none to the end. `record_step` and `record_event` only buffer; `flush`,
    a heartbeat, a final state and `close` write.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time, former: RunStatus | None = None):
        """For `create` and `reopen`. From now on `path` belongs to this object; `former` is the last known status."""
        with ExitStack() as undo:
            self._lock = DriverLock(path)
            undo.callback(self._lock.release)
            self._metrics = JsonLines(path / "metrics.jsonl")
            undo.callback(self._metrics.close)
            self._events = JsonLines(path / "events.jsonl")
            undo.pop_all()
        self.first_attempt = 0
        """How often the run was started by earlier drivers."""
        self.path = path
        self.name = f"{path.parent.name}/{path.name}"
        self.checkpoints_dir = path / "checkpoints"
        self.logs_dir = path / "logs"
        self._clock = clock
        self._rows: RowsFile | None = None
        self._status = StatusFile(path / "status.json", clock, former)
        self._heartbeat: Heartbeat | None = None
        self._environment: threading.Thread | None = None
        self._flush_lock = threading.RLock()
        self._num_lost_told = 0
        self._has_warned = False

    @classmethod
    def create(cls, logdir: Path | str, *, clock: Callable[[], float] = time.time) -> "RunFolder":
        """Makes the next run of a Trainer's folder, in state PENDING. ArgumentError if storage refuses it: then the
        folder says FAILED, or is gone again where not even that can be written."""
        path = make_run_dir(Path(logdir))
        try:
            folder = cls(path, clock)
        except OSError as error:
            shutil.rmtree(path, ignore_errors=True)
            raise unusable(path, error) from error
        try:
            folder._begin()
        except OSError as error:
            refusal = unusable(path, error)
            folder._fail(str(refusal))
            raise refusal from error
        return folder

    def _begin(self) -> None:
        self.checkpoints_dir.mkdir(exist_ok=True)
        self.logs_dir.mkdir(exist_ok=True)
        self._status.beat()

    def _fail(self, reason: str) -> None:
        """A new run ends before it has begun."""
        is_told = False
        with suppress(OSError):
            self._status.set(RunState.FAILED, reason, {})
            is_told = True
        self.close()
        if not is_told:
            shutil.rmtree(self.path, ignore_errors=True)

    @classmethod
    def reopen(cls, path: Path, *, clock: Callable[[], float] = time.time) -> "RunFolder":
        """Go on with a run that has ended or was lost, in state PENDING. TrainerStateError if it is being driven,
        RunNotResumableError if it cannot be written, RunDamagedError if it cannot be read."""
        former = RunStatus.from_fields(read_json(path / "status.json") or {})
        try:
            folder = cls(path, clock, former)
            try:
                folder.first_attempt = 1 + _last_attempt(read_json_lines(path / "events.jsonl"))
                folder._begin()
            except BaseException:
                folder.close()
                raise
        except OSError as error:
            raise RunNotResumableError(f"The run cannot go on, because {path} cannot be written: {error}.") from error
        return folder

    def log_path(self, rank: int) -> Path:
        return self.logs_dir / f"rank_{rank}.log"

    @property
    def state(self) -> RunState:
        return self._status.state

    def write_request(self, request: Mapping[str, Any]) -> None:
        """Writes run.json, once: what was asked does not change while it is being done."""
        path = self.path / "run.json"
        if path.exists():
            raise TrainerStateError(f"{path} is already written: the request of a run is recorded once.")
        root = str(request.get("checkpoint_root") or self.checkpoints_dir)
        if root != str(self.checkpoints_dir):  # readers go there only if they see that it was us who wrote it down
            request = {**request, "checkpoint_root_seal": seal_place(root)}
        with self._tolerate_refusal(path):
            write_atomic(path, encode_document(request))

    def write_document(self, name: str, data: bytes) -> None:
        """A file of whoever begins the run, beside ours: the configuration that it was made of, say."""
        with self._tolerate_refusal(self.path / name):
            write_atomic(self.path / name, data)

    def keep_call(self, request: RunRequest) -> None:
        """Writes what `Trainer.resume` needs."""
        with self._tolerate_refusal(self.path / CALL_FILE):
            keep_call(self.path, request)

    def record_environment(self) -> None:
        """Writes environment.json and code.diff in the background; `close` waits for it."""
        self._environment = threading.Thread(target=self._write_environment, name="paceline-environment", daemon=True)
        self._environment.start()

    def _write_environment(self) -> None:
        from paceline.runs.environment import write_environment

        with self._tolerate_refusal(self.path / "environment.json"):
            write_environment(self.path)

    def set_state(self, state: RunState | str, reason: str | None = None, **fields: Any) -> None:
        """Writes status.json; `fields`, such as worker_pids, stay until they are set again.

        A final state is durable, comes after every line recorded so far, and stands: later calls do nothing.
        """
        state = RunState(state)
        if state.is_final:
            self.sync()
        with self._tolerate_refusal(self._status.path):
            self._status.set(state, reason, fields)
        if state.is_final:
            self.stop_heartbeat()

    def note_progress(self, progress: float) -> None:
        """In status.json from the next heartbeat on."""
        self._status.note(progress=progress)

    def start_heartbeat(self, interval_s: float = 2.0) -> None:
        """Shows readers that the driver lives, and flushes, until the state is final. Idempotent."""
        if self._heartbeat is None and not self.state.is_final:
            self._heartbeat = Heartbeat(self.beat, interval_s)
            self._heartbeat.start()

    def stop_heartbeat(self) -> None:
        heartbeat, self._heartbeat = self._heartbeat, None
        if heartbeat is not None:
            heartbeat.stop()

    def beat(self) -> bool:
        """One heartbeat, for who has a loop of their own; False when the run needs no more of them."""
        self.flush()
        with self._tolerate_refusal(self._status.path):
            self._status.beat()
        return not self.state.is_final

    def record_step(self, iteration: int, attempt: int, results: Sequence[Mapping[str, Any] | None]) -> None:
        """One line of metrics.jsonl; `results` has one entry a rank, None for a rank without one."""
        self._metrics.append({"step": iteration, "attempt": attempt, "time": self._clock(), "ranks": results})
        if len(self._metrics) >= _MAX_WAITING_LINES:
            self.flush()

    def record_event(self, kind: str, /, **fields: Any) -> None:
        """One line of events.jsonl; a `time` among the fields, such as a worker's, replaces ours."""
        self._events.append({"time": self._clock(), **fields, "kind": kind})

    def record_begin(self, **fields: Any) -> None:
        """Of an attempt whose rows are recorded; makes rows.bin."""
        with self._tolerate_refusal(self.path / ROWS_FILE):
            self._rows = self._rows or RowsFile(self.path / ROWS_FILE)
            self._rows.append_begin(fields)

    def record_rows(self, attempt: int, rank: int, message: bytes) -> None:
        """One frame of rows.bin: what a rank's shards have handed out."""
        if self._rows is not None:
            self._rows.append_rows(attempt, rank, message)
            if len(self._rows) >= _MAX_WAITING_LINES:
                self.flush()

    @property
    def _files(self) -> list[Appended]:
        return [self._metrics, self._events, *([self._rows] if self._rows is not None else [])]

    def flush(self) -> None:
        """Hands all lines to the kernel: from then on they survive a kill of this process."""
        with self._flush_lock:
            has_written = [self._flush_lines(lines) for lines in self._files]
            if any(has_written):
                self._tell_lost_lines()

    def sync(self) -> None:
        """Flushes, and makes all lines so far survive a crash of the machine."""
        self.flush()
        for lines in self._files:
            with suppress(OSError):  # some storage cannot; the lines are with the kernel, which is all we need
                lines.sync()

    def close(self) -> None:
        """Stops the heartbeat, flushes and closes; the state stays what it is. Idempotent."""
        self.stop_heartbeat()
        if self._environment is not None:
            self._environment.join(_ENVIRONMENT_TIMEOUT_S)
        with self._flush_lock:
            self.flush()
            self._tell_lost_lines(is_last=True)
            for lines in self._files:
                with self._tolerate_refusal(lines.path):
                    lines.close()
        self._lock.release()

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _flush_lines(self, lines: Appended) -> bool:
        """Whether something was written, and so whether there is room."""
        if not len(lines):
            return False
        with self._tolerate_refusal(lines.path):
            lines.flush()
            return True
        return False

    def _tell_lost_lines(self, is_last: bool = False) -> None:
        """In the folder if there is room; when it is the last time, in the log where there is none."""
        num_steps, num_events = self._metrics.num_lost, self._events.num_lost
        num_rows = self._rows.num_lost if self._rows is not None else 0
        if num_steps + num_events + num_rows <= self._num_lost_told:
            return
        self.record_event("lines_lost", num_steps=num_steps, num_events=num_events, num_rows=num_rows)
        is_told = self._flush_lines(self._events)
        if is_last and not is_told:
            logger.warning("%d steps and %d events of %s are in no file.", num_steps, num_events, self.path)
        if is_last or is_told:
            self._num_lost_told = sum(lines.num_lost for lines in self._files)

    @contextmanager
    def _tolerate_refusal(self, path: Path | str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "%s could not be written (%s). The run goes on; records are missing until there is room "
                    "again, and this is not said twice.",
                    path,
                    error.strerror or error,
                )


def _last_attempt(events: Sequence[Mapping[str, Any]]) -> int:
    numbers = (event.get("number") for event in events if event.get("kind") == "attempt")
    return max((number for number in numbers if isinstance(number, int)), default=0)


def checkpoint_root(request: RunRequest, folder: RunFolder) -> str:
    """Where the checkpoints of a run go: a path or a URL."""
    if request.checkpoint_root is not None:
        return request.checkpoint_root
    place, name = request.checkpoint_strategy.storage_path, f"{folder.path.parent.name}/{folder.path.name}"
    if place is None:
        return str(folder.checkpoints_dir)
    if "://" in place:
        return f"{place.rstrip('/')}/{name}"
    return str(Path(place).expanduser().absolute() / name)  # the run folder keeps it, and is read from anywhere


def claim_root(request: RunRequest, folder: RunFolder) -> str:
    """The same for a run that begins. ArgumentError if another run has its checkpoints there: each would count on with
    the other's numbers, and delete what is not its own. Then the folder tells it too."""
    root = checkpoint_root(request, folder)
    strategy = request.checkpoint_strategy
    try:
        if strategy.storage_path is not None and strategy.num_to_keep != 0:
            _claim(root)
    except BaseException as error:
        folder.set_state(RunState.FAILED, reason=f"{type(error).__qualname__}: {error}")
        folder.close()
        raise
    return root


def _claim(root: str) -> None:
    try:
        open_storage(root).claim()
    except FileExistsError as error:
        raise ArgumentError(
            f"The checkpoints of this run would go to {root}, which exists: another run, whose logdir has the same "
            "name, keeps its checkpoints there. Give this Trainer a logdir of another name, or the strategy another "
            "storage_path. If nobody needs what is there, delete it."
        ) from error
    except OSError as error:
        logger.debug("%s cannot be claimed: %s", root, error)  # who saves there will hear of it
