"""Results as TensorBoard event files, through tensorboardX."""

import logging
import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline import frameworks
from paceline.callbacks.base import Callback
from paceline.callbacks.flatten import BOOKKEEPING_KEYS, as_number, flatten, step_of
from paceline.callbacks.log_dir import check_log_dir, make_log_dir
from paceline.callbacks.optional_package import environment_defaults, require
from paceline.callbacks.selection import single_worker

if TYPE_CHECKING:
    from paceline.checkpoints import CheckpointInfo

logger = logging.getLogger(__name__)

_FLUSH_INTERVAL_S = 1.0
_NUM_BINS = 64


class TBXLoggerCallback(Callback):
    """Writes one worker's numbers as scalars, and its lists and arrays as histograms.

    The step is `_training_iteration`. Nested dicts become tags like `loss/train`; NaN, strings and other
    objects are left out. When steps are made again, after a restart or in a resumed run (which adds an event
    file), TensorBoard is told to forget their first version. Steps without that worker are left out.

    It writes events in the caller's thread: tensorboardX's own SummaryWriter does it in a thread of its own,
    where a full disk ends that thread, unseen, and later blocks the caller for ever.
    """

    def __init__(self, logdir: str | os.PathLike[str] | None = None, worker_to_log: int | Sequence[int] = 0):
        require("tensorboardX", "tensorboard", "TBXLoggerCallback")
        self._explicit_dir = check_log_dir(logdir)
        self._selection = single_worker(worker_to_log)
        self._logdir: Path | None = None
        self._events: Any = None  # tensorboardX is not typed
        self._last_step = 0
        self._follows_driver = False
        self._last_flush_s = 0.0
        self._complained: set[str] = set()

    @property
    def logdir(self) -> Path | None:
        """Where the event files are; None before the first run."""
        return self._logdir

    def start_training(self, logdir: str, config: dict[str, Any], **info: Any) -> None:
        self._selection.check(info.get("num_workers"))
        self._logdir = make_log_dir(self._explicit_dir, logdir)
        self._open_file()
        self._last_step = 0
        self._follows_driver = bool(info.get("is_resumed"))
        self._complained = set()

    def handle_result(self, results: list[dict[str, Any]], **info: Any) -> None:
        if self._events is None:
            return
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        step = step_of(results[0])  # whoever is followed: what is made again without that rank is forgotten too
        if step <= self._last_step or self._follows_driver:
            self._forget_from(step)
        self._last_step = step
        for result in self._selection.pick(results):
            values = [value for tag, item in flatten(result).items() for value in self._values(tag, item)]
            self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def handle_checkpoint(self, checkpoint: "CheckpointInfo", **info: Any) -> None:
        if self._events is not None:
            self._flush()  # steps before a checkpoint are not made again, even if this process is killed now

    def finish_training(self, error: bool = False, **info: Any) -> None:
        events, self._events = self._events, None
        if events is not None:
            events.close()

    def _write(self, event: Any) -> None:
        with self._naming_the_folder():
            self._events.write_event(event)
        if time.monotonic() - self._last_flush_s >= _FLUSH_INTERVAL_S:
            self._flush()

    def _flush(self) -> None:
        """To the disk, with fsync: not for every one of many quick reports."""
        with self._naming_the_folder():
            self._events.flush()
        self._last_flush_s = time.monotonic()

    @contextmanager
    def _naming_the_folder(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._logdir)) from error

    def _open_file(self) -> None:
        # Importing tensorboardX sets this variable for its checksums, and would leave it set.
        with environment_defaults(CRC32C_SW_MODE="auto"):
            from tensorboardX.event_file_writer import EventsWriter

        # Several files may be begun within one second, which is all that tells their names apart and in order.
        prefix = os.path.join(str(self._logdir), "events")
        self._events = EventsWriter(prefix, f".{time.time_ns()}.{os.getpid()}")

    def _forget_from(self, step: int) -> None:
        """Goes on in a new file whose first event makes TensorBoard drop what it has from this step on."""
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        if not self._follows_driver:  # else the present file is new
            self._events.close()
            self._open_file()
        self._follows_driver = False
        started = SessionLog(status=SessionLog.START)
        self._write(Event(wall_time=time.time(), step=step, session_log=started))

    def _values(self, tag: str, item: Any) -> list[Any]:
        """The summary values of one reported item: one, or none."""
        from tensorboardX.proto.summary_pb2 import Summary
        from tensorboardX.summary import make_histogram

        if tag in BOOKKEEPING_KEYS:
            return []
        number = as_number(item)
        if number is not None:
            return [] if math.isnan(number) else [Summary.Value(tag=tag, simple_value=number)]
        is_array = getattr(item, "ndim", 0) > 0 and len(item) > 0
        if not is_array and not (isinstance(item, list | tuple) and item):
            return []
        try:
            return [Summary.Value(tag=tag, histo=make_histogram(_finite_numbers(item), _NUM_BINS))]
        except (TypeError, ValueError, OverflowError) as problem:
            if tag not in self._complained:
                self._complained.add(tag)
                logger.warning("TensorBoard gets no histogram of %r: %s (said once)", tag, problem)
            return []


def _finite_numbers(item: Any) -> Any:
    import numpy

    numbers = numpy.asarray(frameworks.plain(item), dtype=float)
    if not numpy.isfinite(numbers).all():
        raise ValueError("it has values that are NaN or infinite")
    return numbers
